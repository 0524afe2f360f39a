"""MXFP4: two E2M1 codes a byte, low nibble first, and one E8M0 scale byte per 32 values (text-model section 8.1).

``value = E2M1[code] * 2**(scale - 127)`` has at most two significant bits, so float32 and bfloat16 hold it exactly.

Three ways to read a matrix. ``decode`` gives it in its own order. ``decode_planes`` gives its even and its odd columns,
which costs a CPU a tenth of putting them in order. ``unpack`` keeps one int8 a value for later: ``decode_codes`` of
that costs half as much again.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Num, UInt8, UInt16

GROUP = 32
"""Values that share a scale byte."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each code."""

SCALE_BIAS = 127
"""The scale byte that means 1."""

NAN_SCALE = 255
"""The scale byte that means NaN; no released weight holds it."""

PLANE_UNIT = 2.0**14
"""What the values of ``decode_planes`` count."""

SCALE_EXPONENTS = (-126, 125)
"""Exponents that ``encode`` writes (training notes: the published projection)."""

_ROUND_UP = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between neighbouring magnitudes, and whether a value on the midpoint goes up, to an even code."""


def decode(
    packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows groups"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*rows width"]:
    """The values, in order.

    Args:
      packed: byte ``j`` of a row holds value ``2j`` in its low and ``2j + 1`` in its high nibble.
      scale: byte ``k`` belongs to values ``32k .. 32k + 31``.
      dtype: float32 or bfloat16.

    Returns:
      Exact in the normal range of ``dtype``; values past its end are infinite, subnormal ones may be flushed to zero,
      and a group with scale byte 255 is NaN.

    Raises:
      ValueError: the widths do not belong together.
    """
    _check_widths(2 * packed.shape[-1], packed.shape, scale.shape)
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, GROUP)
    values = jnp.asarray(E2M1, jnp.float32)[nibbles]
    # 2**-127 is subnormal: its half goes to the value, by a select that a compiler cannot fold back into the scale
    values = values * jnp.where(scale == 0, 0.5, 1.0)[..., None] * _power(jnp.maximum(scale, 1))[..., None]
    values = jnp.where(scale[..., None] == NAN_SCALE, jnp.nan, values)
    return values.reshape(*packed.shape[:-1], -1).astype(dtype)


def encode(
    values: Num[Array, "*rows width"],
) -> tuple[UInt8[Array, "*rows half"], UInt8[Array, "*rows groups"]]:
    """Projects values onto the format: packed codes and scale bytes.

    The exponent of a group is ``clamp(ceil(log2(amax / 6)), -126, 125)`` and codes are rounded to nearest even
    (training notes). A group whose largest value was rounded to 3 is stored with twice the values and half the scale.
    Encoding what ``decode`` gives therefore changes nothing: bytes made here come back as they are, minus zero
    included; foreign bytes come back with equal values, and equal bytes in every group that holds a 4 or a 6. A group
    with a NaN or an infinity becomes NaN (scale byte 255).

    Raises:
      ValueError: the width is not a multiple of 32.
    """
    width = values.shape[-1]
    _check_whole(width)
    groups = values.astype(jnp.float32).reshape(*values.shape[:-1], width // GROUP, GROUP)
    exponent = _group_exponent(jnp.max(jnp.abs(groups), axis=-1))
    codes = _round(jnp.abs(groups) * _power((SCALE_BIAS - exponent).astype(jnp.uint8))[..., None])
    # the largest is 3, code 5: every code has a double, and from the values alone the finer scale would be chosen
    halve = (jnp.max(codes, axis=-1) <= 5) & (exponent > SCALE_EXPONENTS[0])
    codes = jnp.where(halve[..., None], jnp.asarray((0, 2, 4, 5, 6, 7, 7, 7), jnp.uint8)[codes], codes)
    scale = (exponent - halve + SCALE_BIAS).astype(jnp.uint8)
    scale = jnp.where(jnp.all(jnp.isfinite(groups), axis=-1), scale, jnp.uint8(NAN_SCALE))
    nibbles = (codes | (jnp.signbit(groups).astype(jnp.uint8) << 3)).reshape(*values.shape[:-1], width // 2, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale


def project(values: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """``decode(encode(values))`` as arithmetic, float32: what training multiplies with, many times over.

    Raises:
      ValueError: the width is not a multiple of 32.
    """
    _check_whole(values.shape[-1])
    groups = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, GROUP)
    exponent = _group_exponent(jnp.max(jnp.abs(groups), axis=-1)).astype(jnp.int32)
    up, down = (_power((SCALE_BIAS + sign * exponent).astype(jnp.uint8))[..., None] for sign in (-1, 1))
    magnitude = jnp.abs(groups) * up
    # neighbours are 0.5 apart below 2, 1 below 4, then 2: even codes are even multiples of that
    apart = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    rounded = jnp.minimum(jnp.round(magnitude / apart) * apart, E2M1[7])
    return (jnp.copysign(rounded, groups) * down).reshape(values.shape)


def decode_planes(
    packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows groups"]
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """Float32 values of the even and of the odd columns, in units of ``PLANE_UNIT``.

    The unit comes from reading a nibble as the top of a float16; applied here, it would overflow with large scales.
    Exact for values from 2**-110 on; smaller ones may be flushed to zero.
    """
    _check_widths(2 * packed.shape[-1], packed.shape, scale.shape)
    wide = packed.astype(jnp.uint16).reshape(*scale.shape, GROUP // 2)
    low, high = (_half_float(nibble) * _power(scale)[..., None] for nibble in (wide, wide >> 4))
    return low.reshape(packed.shape), high.reshape(packed.shape)


def unpack(packed: UInt8[Array, "*rows half"]) -> Int8[Array, "*rows width"]:
    """One int8 a value: twice the E2M1 value, in order. Minus zero becomes zero."""
    doubled = jnp.asarray([round(2 * value) for value in E2M1], jnp.int8)
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return doubled[nibbles].reshape(*packed.shape[:-1], -1)


def decode_codes(codes: Int8[Array, "*rows width"], scale: UInt8[Array, "*rows groups"]) -> Float[Array, "*rows width"]:
    """What ``decode`` gives, from the codes of ``unpack``; values under scale byte 0 or 1 may be flushed to zero."""
    _check_widths(codes.shape[-1], codes.shape, scale.shape)
    grouped = codes.reshape(*scale.shape, GROUP).astype(jnp.float32)
    return (grouped * (0.5 * _power(scale))[..., None]).reshape(codes.shape)


def check_scales(name: str, scale: np.ndarray) -> list[str]:
    """What is wrong with stored scale bytes, one line per problem; empty when nothing is."""
    bad = np.argwhere(np.asarray(scale) == NAN_SCALE)
    if not len(bad):
        return []
    first = ", ".join(map(str, bad[0]))
    return [f"{name}: {len(bad)} of {scale.size} scale bytes are {NAN_SCALE}, which means NaN; the first at [{first}]"]


def _power(scale: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``2**(scale - 127)`` by its bits; 0 for scale byte 0 and infinity for 255."""
    return lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def _half_float(nibble: UInt16[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The low four bits as a float16's sign, low exponent bits and first mantissa bit: their value / ``PLANE_UNIT``."""
    bits = ((nibble & 7) << 9) | ((nibble & 8) << 12)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _group_exponent(largest: Float[Array, "*groups"]) -> Num[Array, "*groups"]:
    """``clamp(ceil(log2(largest / 6)))`` without a rounded logarithm: 6 is 0.75 * 2**3."""
    mantissa, exponent = jnp.frexp(largest)
    exponent = exponent - 3 + (mantissa > 0.75)
    return jnp.clip(jnp.where(largest > 0, exponent, SCALE_EXPONENTS[0]), *SCALE_EXPONENTS)


def _round(magnitude: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The code of the nearest magnitude, ties to the even code; above 6 it is 6."""
    passed = [magnitude >= bound if up else magnitude > bound for bound, up in _ROUND_UP]
    return jnp.sum(jnp.stack(passed), axis=0, dtype=jnp.uint8)


def _check_whole(width: int) -> None:
    if width % GROUP:
        raise ValueError(
            f"MXFP4 rows are whole groups of {GROUP}, not {width} values; pad to {-(-width // GROUP) * GROUP}"
        )


def _check_widths(width: int, codes: tuple[int, ...], scale: tuple[int, ...]) -> None:
    if width != GROUP * scale[-1] or codes[:-1] != scale[:-1]:
        raise ValueError(
            f"codes {codes} hold {width} values a row, which need scales {(*codes[:-1], width / GROUP)}; got {scale}"
        )
