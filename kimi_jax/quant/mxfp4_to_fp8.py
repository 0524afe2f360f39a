"""MXFP4 weights as FP8 e4m3fn codes: which scales make that exact, and the conversion.

A value is ``+-{0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2**(scale - 127)``: at most two significant bits, of which e4m3fn keeps four in its
normal range, 2**-6 to 448. Two ends bound the exponent ``e = scale - 127``:

    top:     6 * 2**e <= 448                                 e <= 6     (6 * 64 = 384; 768 has no code)
    bottom:  0.5 * 2**e is a multiple of 2**-9, the step of subnormals: e >= -8  (1.5 * 2**-8 = 3 * 2**-9 is one too)

So a group is exact for scale bytes 119 to 133 whatever its codes are. A scale per output channel (``quant/fp8``) moves that
window as a power of two: a row is exact where its scale bytes lie within 14 of one another.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt8

from kimi_jax.quant.fp8 import E4M3
from kimi_jax.quant.mxfp4 import E2M1, GROUP, NAN_SCALE, SCALE_BIAS

EXACT_EXPONENTS = (-8, 6)
"""Least and greatest exponent of a group that e4m3fn holds exactly."""

_SMALLEST_ROW = 7
"""Least scale byte that a row's scale is made from, so that it is no subnormal float32: 2**(7 - 127 - 6)."""


def exact_in_fp8(scale: UInt8[Array, "*groups"]) -> Bool[Array, "*groups"]:
    """Whether e4m3fn holds every value of a group, by its scale byte alone; a NaN group is held by nothing."""
    low, high = EXACT_EXPONENTS
    exponent = scale.astype(jnp.int32) - SCALE_BIAS
    return (exponent >= low) & (exponent <= high)


def exact_by_row(scale: UInt8[Array, "*rows groups"]) -> Bool[Array, "*rows"]:
    """Whether :func:`to_fp8` is exact for a row, by its scale bytes alone."""
    wide = scale.astype(jnp.int32)
    top, low = jnp.maximum(wide.max(axis=-1), _SMALLEST_ROW), wide.min(axis=-1)
    return (top - low <= EXACT_EXPONENTS[1] - EXACT_EXPONENTS[0]) & (top < NAN_SCALE)


def to_fp8(
    packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows groups"]
) -> tuple[Float[Array, "*rows width"], Float[Array, "*rows"]]:
    """Codes e4m3fn and a scale per row, a power of two that puts the row's largest scale byte at the top of the window.

    Args:
      packed, scale: as for ``mxfp4.decode``.

    Returns:
      ``codes * scale[..., None]`` is the weight: exactly where :func:`exact_by_row`, elsewhere values of groups far below the
      largest are rounded to the nearest step of 2**-9 (times the scale), and a row with a NaN group is NaN.
    """
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, GROUP)
    wide = scale.astype(jnp.int32)
    top = jnp.maximum(wide.max(axis=-1), _SMALLEST_ROW)
    high = EXACT_EXPONENTS[1]
    below = jnp.maximum(wide - top[..., None], -64)  # further down everything is zero
    values = jnp.asarray(E2M1, jnp.float32)[nibbles] * _power(below + high)[..., None]
    row = jnp.where(top == NAN_SCALE, jnp.nan, _power(top - SCALE_BIAS - high))
    return values.reshape(*packed.shape[:-1], -1).astype(E4M3), row


def _power(exponent: Array) -> Array:
    """``2**exponent`` in the normal range of float32, by its bits."""
    return lax.bitcast_convert_type((exponent + SCALE_BIAS) << 23, jnp.float32)
