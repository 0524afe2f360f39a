"""New index keys into their cache, in place: one launch with the LayerNorm and the rounding to the format of the cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.indexer.keys import FP8_LARGEST, IndexCache
from kimi_jax.ops.launch import launch, load, padded, span
from kimi_jax.ops.mla.launch import capacity, check_cache, locate
from kimi_jax.ops.once import once
from kimi_jax.quant.mxfp4 import GROUP, NAN_SCALE, SCALE_BIAS, SCALE_EXPONENTS

MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between neighbouring magnitudes of E2M1, and whether a value on the midpoint goes up, to an even code."""


class KeyNorm(NamedTuple):
    """LayerNorm of a key."""

    weight: Float[Array, " width"]
    bias: Float[Array, " width"]


@once
def write(
    index: IndexCache,
    keys: Float[Array, "rows tokens width"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    norm: KeyNorm | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    eps: float = 0.0,
    dtype: Any = None,
    interpret: bool = False,
) -> IndexCache:
    """See ``cache.write_keys``; ``eps`` is the norm's, ``dtype`` what its result is rounded to before the cache's format."""
    check_cache(index.keys, None, "an index cache")
    rows, tokens, width = keys.shape
    room, page = capacity(index.keys, pages), index.keys.shape[1]
    of_cache = index.keys.dtype
    leaves = jax.tree.leaves(index)
    packed, scaled = of_cache == jnp.uint8, len(leaves) > 1

    def kernel(
        index_ref: IndexCache,
        keys_ref: Any,
        starts_ref: Any,
        counts_ref: Any,
        pages_ref: Any,
        norm_ref: Any,
        *out_ref: Any,
    ) -> None:
        del index_ref  # the results lie in its place
        token, row = pl.program_id(0), pl.program_id(1)
        position = starts_ref[row] + token

        def load_key(at: Any) -> Any:
            """Channels ``at``, zeros past the last."""
            return load(keys_ref, row, token, at, limits=(None, None, width)).astype(jnp.float32)

        @pl.when((token < counts_ref[row]) & (position < room))
        def _() -> None:
            held, offset = locate(pages_ref, row, position, page)
            there = offset + span(0, 1)
            if packed:
                pair = 2 * span(0, padded(-(-width // GROUP), 1) * GROUP // 2)
                channels = [pair, pair + 1]  # a byte holds two
            else:
                channels = [span(0, padded(width))]
            key = [load_key(at) for at in channels]
            if norm_ref is not None:
                key = [each.astype(dtype).astype(jnp.float32) for each in _normed(key, channels, norm_ref, eps)]
            if packed:
                code_j, scale_g = _mxfp4(*key)
                j, g = span(0, code_j.shape[0]), span(0, scale_g.shape[0])
                plt.store(out_ref[0].at[held, offset, j], code_j, mask=j < index.keys.shape[2])
                plt.store(out_ref[1].at[held, offset, g], scale_g, mask=g < index.scales.shape[2])
                return
            key_c, c = key[0], channels[0]
            if scaled:
                exponent = jnp.clip(_exponent(jnp.max(jnp.abs(key_c)), 9, 0x600000), -126, 126)
                plt.store(out_ref[1].at[held, there], jnp.full((1,), _power(exponent)))
                key_c = key_c * _power(-exponent)
                key_c = jnp.minimum(jnp.maximum(key_c, -FP8_LARGEST), FP8_LARGEST)
            plt.store(out_ref[0].at[held, offset, c], key_c.astype(of_cache), mask=c < width)

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    written = launch(
        kernel,
        "index_write",
        (tokens, rows),
        tuple(shapes) if len(shapes) > 1 else shapes[0],
        index,
        keys,
        starts,
        counts,
        pages,
        norm,
        interpret=interpret,
        warps=1,
        aliases={leaf: leaf for leaf in range(len(leaves))},
    )
    return IndexCache(*written) if len(shapes) > 1 else IndexCache(written)


def _normed(key: list[Any], channels: list[Any], norm_ref: KeyNorm, eps: float) -> list[Any]:
    """``ops.norm.layer_norm`` of a key that lies in several arrays; zeros past its last channel."""
    width = norm_ref.weight.shape[0]
    mean = sum(jnp.sum(each) for each in key) / width
    centred = [jnp.where(at < width, each - mean, 0.0) for each, at in zip(key, channels, strict=True)]
    scale = jax.lax.rsqrt(sum(jnp.sum(each * each) for each in centred) / width + eps)
    weigh = lambda ref, at: load(ref, at, limits=(width,)).astype(jnp.float32)  # noqa: E731
    return [
        each * scale * weigh(norm_ref.weight, at) + weigh(norm_ref.bias, at)
        for each, at in zip(centred, channels, strict=True)
    ]


def _mxfp4(even: Any, odd: Any) -> tuple[Any, Any]:
    """``mxfp4.encode`` of whole groups whose even and odd values come apart: bytes of codes, and of scales."""
    even, odd = (each.reshape(-1, GROUP // 2) for each in (even, odd))
    largest = jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)), axis=1)
    least, most = SCALE_EXPONENTS
    exponent = jnp.clip(jnp.where(largest > 0, _exponent(largest, 3, 0x400000), least), least, most)
    unit = _power(-exponent)[:, None]
    codes = [_code(jnp.abs(each) * unit) for each in (even, odd)]
    # the largest is 3, code 5: every code has a double, and from the values alone the finer scale would be chosen
    top = jnp.max(jnp.maximum(*codes), axis=1)
    halve = (top <= 5) & (exponent > least)
    codes = [
        jnp.where(halve[:, None], jnp.where(each <= 2, 2 * each, jnp.minimum(each + 2, 7)), each) for each in codes
    ]
    low, high = (
        each | jnp.where(jax.lax.bitcast_convert_type(value, jnp.int32) < 0, 8, 0)
        for each, value in zip(codes, (even, odd), strict=True)
    )
    scale = jnp.where(largest < jnp.inf, exponent - halve.astype(jnp.int32) + SCALE_BIAS, NAN_SCALE)
    return (low | (high << 4)).reshape(-1).astype(jnp.uint8), scale.astype(jnp.uint8)


def _code(magnitude: Any) -> Any:
    """The code of the nearest magnitude, ties to the even one; above 6 it is that of 6."""
    passed = [magnitude >= bound if up else magnitude > bound for bound, up in MIDPOINTS]
    return sum(each.astype(jnp.int32) for each in passed)


def _exponent(largest: Any, of_format: int, mantissa: int) -> Any:
    """``ceil(log2(largest / top))`` for a format whose top is ``1.mantissa * 2**(of_format - 1)``, by its bits; 0 for zero."""
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> 23) - 126 - of_format + ((bits & 0x7FFFFF) > mantissa).astype(jnp.int32)
    return jnp.where(largest > 0, exponent, 0)


def _power(exponent: Any) -> Any:
    """``2**exponent`` by its bits; from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
