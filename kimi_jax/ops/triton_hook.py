"""``mx_dot``: Triton's scaled dot inside a Pallas kernel; the one module that reads private names of JAX.

Pallas has no public scaled dot, and without one the weights of a 4-bit product pass through arithmetic instead of the
chip's own conversion. The pins of JAX guard the private names; ``tests/ops/test_triton_hook.py`` fails when they move.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax._src.pallas.triton import lowering as triton
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect
from jaxtyping import Array, Float, UInt8

from kimi_jax.quant import mxfp4

Rows = Literal["bfloat16", "float8_e4m3fn"]

mx_dot_p = Primitive("mx_dot")


def mx_dot(
    rows: Float[Array, "m k"],
    packed: UInt8[Array, "half_k n"],
    scale: UInt8[Array, "n groups"],
    rows_scale: UInt8[Array, "m groups"] | None = None,
) -> Float[Array, "m n"]:
    """``rows @ matrix`` with the matrix in MXFP4; for use inside a Triton kernel.

    On gfx950 bfloat16 rows become one conversion (``cvt.scalef32.pk.bf16.fp4``) and a bfloat16 MFMA; e4m3 rows become
    a scaled MFMA that reads the codes themselves.

    Args:
      rows: bfloat16, or float8_e4m3fn with ``rows_scale``.
      packed: E2M1 codes, of each pair along k the first in the low nibble.
      scale: E8M0 bytes of 32 values along k, one row per column of the matrix.
      rows_scale: E8M0 bytes of e4m3 rows.

    Returns:
      float32; products summed in float32.
    """
    scales = (scale,) if rows_scale is None else (scale, rows_scale)
    return mx_dot_p.bind(rows, packed, *scales)


def _reference(rows: Array, packed: Array, scale: Array, *rows_scale: Array) -> Array:
    """What interpret mode runs."""
    matrix = mxfp4.decode(packed.T, scale)
    wide = rows.astype(jnp.float32)
    for own in rows_scale:
        wide = wide * jnp.repeat(jnp.exp2(own.astype(jnp.float32) - mxfp4.SCALE_BIAS), mxfp4.GROUP, axis=1)
    return lax.dot_general(wide, matrix, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _lower(context: Any, rows: Any, packed: Any, scale: Any, *rows_scale: Any) -> Any:
    result = ir.RankedTensorType.get(list(context.avals_out[0].shape), ir.F32Type.get())
    kinds = dialect.ScaleDotElemType
    kind = {"bfloat16": kinds.BF16, "float8_e4m3fn": kinds.E4M3}[context.avals_in[0].dtype.name]
    zeros, fast_math = triton._zeros(result), False
    own = rows_scale[0] if rows_scale else None
    return dialect.dot_scaled(result, rows, packed, zeros, kind, kinds.E2M1, fast_math, a_scale=own, b_scale=scale)


mx_dot_p.def_impl(_reference)
mx_dot_p.def_abstract_eval(lambda rows, packed, *_: ShapedArray((rows.shape[0], packed.shape[1]), jnp.float32))
mlir.register_lowering(mx_dot_p, mlir.lower_fun(_reference, multiple_results=False))
triton.triton_lowering_rules[mx_dot_p] = _lower
