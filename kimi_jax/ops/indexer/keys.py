"""Index keys as a cache holds them: plain floats, FP8 with a scale a key, or MXFP4 (K3.1 Pro notes, sections 4 and 6)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kimi_jax.quant import mxfp4

FP8_LARGEST = 448.0
"""Largest value of e4m3fn."""


class IndexCache(NamedTuple):
    """Keys of the sparse indexer (K3.1 Pro), one per token.

    Where sequences share a pool, ``rows length`` below is ``pages page``.

    Attributes:
      keys: [rows, length, head_dim], or two codes a byte [rows, length, head_dim / 2] for mxfp4.
      scales: nothing for a plain float dtype, one float32 power of two per key [rows, length] for fp8, one e8m0 byte per 32
        channels [rows, length, head_dim / 32] for mxfp4.
    """

    keys: Any
    scales: Any = ()


def encode(keys: Float[Array, "*tokens width"], like: IndexCache) -> IndexCache:
    """Keys in the format of ``like``, whose dtypes say which one it is.

    FP8: divided by ``amax / 448`` rounded up to a power of two, so that nothing saturates. MXFP4: groups of 32 channels; a
    narrower last group is filled with zeros for the scale only.
    """
    dtype = like.keys.dtype
    if dtype == jnp.uint8:
        width = keys.shape[-1]
        whole = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -width % mxfp4.GROUP)])
        codes, scales = mxfp4.encode(whole)
        return IndexCache(codes[..., : width // 2], scales)
    if dtype != jnp.float8_e4m3fn:
        return IndexCache(keys.astype(dtype))
    wide = keys.astype(jnp.float32)
    exponent = scale_exponent(jnp.max(jnp.abs(wide), axis=-1))
    narrow = jnp.clip(wide * power(-exponent)[..., None], -FP8_LARGEST, FP8_LARGEST)
    return IndexCache(narrow.astype(dtype), power(exponent))


def decode(index: IndexCache) -> Float[Array, "*tokens width"]:
    """The keys as float32."""
    keys, scales = index
    if keys.dtype == jnp.uint8:
        missing = scales.shape[-1] * mxfp4.GROUP // 2 - keys.shape[-1]
        whole = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, missing)])
        return mxfp4.decode(whole, scales)[..., : 2 * keys.shape[-1]]
    wide = keys.astype(jnp.float32)
    return wide if isinstance(scales, tuple) else wide * scales[..., None]


def scale_exponent(largest: Float[Array, "*tokens"]) -> Int[Array, "*tokens"]:
    """``ceil(log2(largest / 448))`` without a rounded logarithm: 448 is 0.875 * 2**9. 0 for zeros."""
    mantissa, exponent = jnp.frexp(largest)
    exponent = exponent - 9 + (mantissa > 0.875)
    # its negative is a normal float32 too
    return jnp.clip(jnp.where(largest > 0, exponent, 0), -126, 126)


def power(exponent: Int[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """``2**exponent`` by its bits; from -126 to 127."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
