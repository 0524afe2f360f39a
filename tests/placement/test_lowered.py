"""What a lowered program says, on programs small enough to count by hand; no plugin and no devices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.placement.compiler import platform_of_mesh
from kimi_jax.placement.device import load_device
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.lowered import Exchange, Launch, LoweredProgram, Passed, read_lowered
from kimi_jax.placement.mesh import abstract_mesh

LAYOUT = Layout("two by four", "", {"data": 2, "tensor": 4}, {"embed": ("tensor",)})
WHOLE = PartitionSpec()


@pytest.fixture(scope="module")
def mesh() -> Any:
    return abstract_mesh(LAYOUT, load_device("mi355x"))


def kernel(x: Any) -> Any:
    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=shape, compiler_params=plt.CompilerParams(), name="double")(x)


def read(mesh: Any, body: Any, *arrays: tuple[tuple[int, ...], Any, PartitionSpec]) -> LoweredProgram:
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, cut)) for shape, dtype, cut in arrays]
    specs = tuple(cut for *_, cut in arrays)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return read_lowered(
        jax.jit(mapped, donate_argnums=0).trace(*given).lower(lowering_platforms=("rocm",)).compiler_ir()
    )


def test_a_kernel_in_a_function_counts_as_often_as_the_function_is_called(mesh):
    # Red when functions are counted instead of calls, or calls of calls are not multiplied.
    inner = jax.jit(kernel)
    outer = jax.jit(lambda x: inner(inner(x)))

    def body(x: Any) -> Any:
        x = outer(outer(outer(x)))
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, inner, x)

    found = read(mesh, body, ((16, 16), jnp.float32, WHOLE))
    assert found.kernels == {Launch("", "double"): 7}  # three times two, and the loop's body once


def test_collectives_are_counted_through_calls_with_the_bytes_of_one_device(mesh):
    # Red when a collective inside a function counts once, or bytes are those of the whole array.
    total = jax.jit(lambda x: jax.lax.psum(x, "tensor"))

    def body(x: Any) -> Any:
        whole = jax.lax.all_gather(total(total(x)), "tensor", axis=1, tiled=True)
        return x + whole[:, : x.shape[1]]

    found = read(mesh, body, ((6, 8), jnp.bfloat16, PartitionSpec("data", "tensor")))
    assert found.collectives == {Exchange("all-reduce", 3 * 2 * 2): 2, Exchange("all-gather", 3 * 8 * 2): 1}


def test_arguments_weigh_one_devices_share_and_say_whether_they_are_donated(mesh):
    # Red when a mesh axis is not divided out, a byte is taken for a bit, or donation is not read.
    both = PartitionSpec(("data", "tensor"), None)
    found = read(
        mesh, lambda a, b, c: a + b.astype(a.dtype), ((8, 3), jnp.bfloat16, both), ((8, 3), jnp.bool_, both),
        ((5,), jnp.float8_e4m3fn, WHOLE),
    )  # fmt: skip
    # the third is never read, so JAX does not pass it
    assert [(a.bytes, a.donated) for a in found.arguments] == [(3 * 2, True), (3, False)]
    assert isinstance(found.arguments[0], Passed)


def test_an_abstract_mesh_says_its_platform(mesh):
    # Red when a program over it runs what a CPU would.
    assert platform_of_mesh(mesh) == "rocm"
    assert mesh.abstract_device.device_kind == "gfx950"
