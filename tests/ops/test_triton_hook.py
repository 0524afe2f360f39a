"""The private hook: red when the pins move and JAX has renamed, dropped or changed what it stands on."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from kimi_jax.ops.triton_hook import mx_dot
from kimi_jax.quant import mxfp4

MI355X = AbstractMesh(
    (1,),
    ("tensor",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="gfx950", num_cores=256, platform="rocm"),
)


def operands(rows: str) -> list[jax.Array]:
    """16 rows, 64 columns, 128 values along the sum; codes as ``mx_dot`` wants them."""
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (64, 64), np.uint8)
    scale = random.integers(120, 130, (64, 4), np.uint8)
    x = random.normal(size=(16, 128)).astype(ml_dtypes.bfloat16)
    if rows == "bfloat16":
        return list(map(jnp.asarray, (x, packed.T, scale)))
    own = random.integers(125, 129, (16, 4), np.uint8)
    return list(map(jnp.asarray, (x.astype(ml_dtypes.float8_e4m3fn), packed.T, scale, own)))


def kernel(*refs):
    *operands, out_ref = refs
    out_ref[...] = mx_dot(*(ref[...] for ref in operands))


def call(**options):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16, 64), jnp.float32), **options)


@pytest.mark.parametrize("rows", ["bfloat16", "float8_e4m3fn"])
def test_the_kernel_holds_a_scaled_dot(rows):
    # Red when the rule is not found (NotImplementedError), or the dialect's op, its operands or its enums have changed.
    program = jax.jit(call(compiler_params=plt.CompilerParams(num_warps=4, num_stages=1)))
    with use_abstract_mesh(MI355X):
        lowered = program.trace(*operands(rows)).lower(lowering_platforms=("rocm",))
    text = str(lowered.compiler_ir("stablehlo"))
    assert "__gpu$xla.gpu.triton" in text
    assert "dot_scaled" in text


@pytest.mark.parametrize("rows", ["bfloat16", "float8_e4m3fn"])
def test_interpreted_it_is_the_product_with_decoded_weights(rows):
    # Red when a nibble, a scale or the rows' own scale is read from the wrong place.
    x, packed, scale, *own = operands(rows)
    got = jax.jit(call(interpret=True))(x, packed, scale, *own)
    wide = np.asarray(x, np.float64)
    if own:
        wide = wide * np.repeat(2.0 ** (np.asarray(own[0], int) - 127), 32, axis=1)
    expected = wide @ np.asarray(mxfp4.decode(packed.T, scale), np.float64).T
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
