"""A tile of rows times a tile of MXFP4 bytes, inside a kernel; three ways."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from kimi_jax.ops.triton_hook import mx_dot
from kimi_jax.quant.mxfp4 import GROUP, SCALE_BIAS

Product = Literal["scaled", "fp8", "decoded"]
"""``scaled``: bfloat16 rows, the chip converts the weights. ``fp8``: rows rounded to e4m3 in groups of 32 like the
weights, for where products, not bytes, are the limit; moves the experts' sum by 4.6% of its norm (interpreted, random
weights, 3584 to 384 and back). ``decoded``: weights decoded by integer arithmetic, exact for float32 rows, and
independent of private names of JAX.
"""

FP8_TOP = (8, 0x600000)
"""Exponent and float32 mantissa bits of the largest e4m3 value, 448 = 1.75 * 2**8 (OCP Microscaling Formats, 5.3)."""


def product_of(dtype: DTypeLike) -> Product:
    """The one that keeps what rows of this dtype hold."""
    return "scaled" if dtype == jnp.bfloat16 else "decoded"


def product(
    rows: Float[Array, "m k"], packed: UInt8[Array, "n half_k"], scale: UInt8[Array, "n groups"], way: Product
) -> Float[Array, "m n"]:
    """``rows @ matrix^T`` in float32."""
    if way == "decoded":
        matrix = decode_tile(packed, scale).astype(rows.dtype)
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        return lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
    if way == "fp8":
        rows, rows_scale = round_to_fp8(rows.astype(jnp.float32))
        return mx_dot(rows, packed.T, scale, rows_scale)
    return mx_dot(rows.astype(jnp.bfloat16), packed.T, scale)


def decode_tile(packed: UInt8[Array, "n half_k"], scale: UInt8[Array, "n groups"]) -> Float[Array, "n k"]:
    """``mxfp4.decode`` without a table, float32; values under scale byte 0 or 1 may be flushed to zero."""
    rows, half = packed.shape
    wide = packed.astype(jnp.int32)
    code = jnp.stack([wide & 15, wide >> 4], axis=-1).reshape(rows, 2 * half)
    size = code & 7
    # twice the magnitude: 0 1 2 3 4 6 8 12
    doubled = jnp.where(size < 2, size, (2 | size & 1) << (jnp.maximum(size >> 1, 1) - 1)).astype(jnp.float32)
    values = jnp.where(code > 7, -doubled, doubled).reshape(rows, scale.shape[1], GROUP)
    return (values * (0.5 * _power(scale.astype(jnp.int32)))[:, :, None]).reshape(rows, 2 * half)


def round_to_fp8(rows: Float[Array, "m k"]) -> tuple[Float[Array, "m k"], UInt8[Array, "m groups"]]:
    """e4m3 values and the E8M0 byte of every 32: the smallest scale with which the largest value does not saturate."""
    m, k = rows.shape
    groups = rows.reshape(m, k // GROUP, GROUP)
    exponent, mantissa = FP8_TOP
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=2), jnp.int32)
    byte = jnp.maximum((bits + ((1 << 23) - 1 - mantissa) >> 23) - exponent, 1)
    scaled = (groups * _power(2 * SCALE_BIAS - byte)[:, :, None]).reshape(m, k)
    return scaled.astype(jnp.float8_e4m3fn), byte.astype(jnp.uint8)


def _power(exponent: Array) -> Array:
    """``2**(exponent - 127)`` by its bits; 0 for 0 and infinity for 255."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
