"""Index scores in one launch: keys are read once, where they lie and as they are held; heads never leave the registers.

A program takes a few tokens of a sequence and a share of its keys. Every tile of keys meets each token's heads in a product whose
rows are heads, so that the weighted sum over heads mostly stays within a lane. The scale of a key is positive: it passes through
the ReLU, and multiplies the sum instead of the key. The scan is bound by bytes: 1,048,576 keys of 132 bytes take 17 us at
8 TB/s, their 8.6 GFLOP 3 us.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.launch import dot, launch, limit, load, padded, span
from kimi_jax.ops.mla.launch import capacity, check_cache, locate_each
from kimi_jax.ops.moe.products import product, product_of
from kimi_jax.ops.once import once
from kimi_jax.quant.mxfp4 import GROUP, SCALE_BIAS

KEYS = 128
"""Keys of one step."""

TOKENS = 4
"""Tokens whose heads a program holds at once: 32 registers of queries each."""

PROGRAMS = 2048
"""Programs of a call: eight for each of an MI355X's 256 compute units (sharding/devices): some read while others multiply."""


@once
def scores(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    pages: Int[Array, "rows pages"] | None = None,
    *,
    fill: bool = True,
    interpret: bool = False,
) -> Float[Array, "rows tokens length"]:
    """See ``api.scores``.

    Args:
      fill: False leaves columns past a query's position as they happen to be, for a caller that does not read them.

    Raises:
      ValueError: a size at which offsets of kernels turn negative.
    """
    check_cache(index.keys, None, "an index cache")
    rows, tokens = positions.shape
    page, room = index.keys.shape[1], capacity(index.keys, pages)
    size = min(TOKENS, tokens)
    blocks = pl.cdiv(tokens, size)
    shares = max(1, min(PROGRAMS // (rows * blocks), pl.cdiv(room, KEYS)))

    def kernel(q_ref: Any, w_ref: Any, index_ref: IndexCache, positions_ref: Any, pages_ref: Any, out_ref: Any) -> None:
        block, share, row = (pl.program_id(axis) for axis in range(3))
        # the last block takes its last token again instead of one that is not there
        token_t = [jnp.minimum(block * size + each, tokens - 1) for each in range(size)]
        position_t = [positions_ref[row, token] for token in token_t]
        own_t = [_queries(q_ref, w_ref, index_ref, row, token) for token in token_t]
        furthest = position_t[0]
        for position in position_t[1:]:
            furthest = jnp.maximum(furthest, position)
        end = jnp.minimum(furthest + 1, room)
        bound = room if fill else end
        held = pl.cdiv(pl.cdiv(bound, shares), KEYS) * KEYS
        first = share * held

        def tile(step: Any, state: Any) -> Any:
            s = first + step * KEYS + span(0, KEYS)
            seen = s < end
            score = _scorer(index_ref, locate_each(pages_ref, row, s, page, seen), seen)
            for token, position, (q_hd, w_h) in zip(token_t, position_t, own_t, strict=True):
                score_s = jnp.where(s <= position, score(q_hd, w_h), -jnp.inf)
                plt.store(out_ref.at[row, token, s], score_s, mask=s < room)
            return state

        steps = pl.cdiv(jnp.maximum(jnp.minimum(first + held, bound) - first, 0), KEYS)
        jax.lax.fori_loop(0, steps, tile, jnp.int32(0))

    return launch(
        kernel,
        "index_scores",
        (blocks, shares, rows),
        jax.ShapeDtypeStruct((rows, tokens, room), jnp.float32),
        q,
        w,
        index,
        positions,
        pages,
        interpret=interpret,
        stages=2,
    )


def _queries(q_ref: Any, w_ref: Any, index_ref: IndexCache, row: Any, token: Any) -> tuple[Any, Any]:
    """The heads of one token [heads, channels] and their weights, as wide as a tile of keys; inside a kernel."""
    heads, width = q_ref.shape[2:]
    h, d = span(0, padded(heads)), span(0, _channels(index_ref))
    fits = None if d.shape[0] == width else width
    q_hd = load(q_ref, row, token, h[:, None], d[None], limits=(None, None, limit(heads), fits))
    return q_hd, load(w_ref, row, token, h, limits=(None, None, limit(heads))).astype(jnp.float32)


def _scorer(index_ref: IndexCache, at: tuple[Any, Any], seen: Any) -> Callable[[Any, Any], Any]:
    """Reads a tile of keys; what it gives maps heads and weights to the scores of the tile. Inside a kernel."""
    keys_ref, scales_ref = index_ref
    wide_at, there = tuple(each[:, None] for each in at), seen[:, None]
    if keys_ref.dtype == jnp.uint8:
        half, groups = keys_ref.shape[2], scales_ref.shape[2]
        j, g = span(0, _channels(index_ref) // 2)[None], span(0, padded(groups, 1))[None]
        code_sj = load(keys_ref, *wide_at, j, limits=(None, None, half if j.size > half else None), where=there)
        exponent_sg = load(
            scales_ref, *wide_at, g, limits=(None, None, limit(groups, g.size)), where=there, other=SCALE_BIAS
        )
        return lambda q_hd, w_h: _reduced(product(q_hd, code_sj, exponent_sg, product_of(q_hd.dtype)), w_h)
    width = keys_ref.shape[2]
    key_sd = load(keys_ref, *wide_at, span(0, padded(width))[None], limits=(None, None, limit(width)), where=there)
    if isinstance(scales_ref, tuple):
        return lambda q_hd, w_h: _reduced(dot(q_hd, key_sd.astype(q_hd.dtype), (1, 1)), w_h)
    scale_s = load(scales_ref, *at, limits=(None, None), where=seen)
    return lambda q_hd, w_h: _reduced(dot(q_hd, key_sd.astype(q_hd.dtype), (1, 1)), w_h) * scale_s


def _channels(index_ref: IndexCache) -> int:
    """Channels of a tile: whole groups where groups share a scale."""
    if index_ref.keys.dtype == jnp.uint8:
        return padded(index_ref.scales.shape[2], 1) * GROUP
    return padded(index_ref.keys.shape[2])


def _reduced(product_hs: Any, w_h: Any) -> Any:
    return jnp.sum(jnp.maximum(product_hs, 0.0) * w_h[:, None], axis=0)
