"""Attention of many queries: cached rows are expanded to per-head keys and values, a block at a time, and met block by block.

Flops per query, row and head: direct 2 x (192 + 128) = 640 and, once a call, 2 x 512 x 256 to expand the row; absorbed
2 x (576 + 512) = 2176. With 2048 queries that is 768 against 2176; they are equal at 171 queries. Expanding inside the attention
kernel would happen again for every tile of queries: 2688 for tiles of 128. A block of 4096 rows and 12 heads takes 77 GFLOP and
moves 4.7 MB of rows, 25 MB of keys and values each way, and 12.6 MB of running results each way: compute-bound. What is held is one
block of keys and values and the running results, whatever the context.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla.expand import load_expand
from kimi_jax.ops.mla.launch import TILE, capacity, dot, launch, limit, load, locate, padded, span
from kimi_jax.ops.mla.reference import MASKED
from kimi_jax.ops.mla.split import LOG2_E

BLOCK = 4096
"""Cached rows expanded at once, over all sequences of a call."""

QUERIES = 128
"""Queries of one program of the attention kernel, all of one head."""

EXPAND_ROWS, EXPAND_COLUMNS, EXPAND_INNER = 128, 128, 64
"""Tile of the product that expands rows."""


class Running(NamedTuple):
    """Softmax state: running maximum (base 2), sum of weights, weighted sum of values; float32."""

    top: Float[Array, "rows tokens heads"]
    weight: Float[Array, "rows tokens heads"]
    value: Float[Array, "rows tokens heads value_dim"]


class Cached(NamedTuple):
    """Where cached rows lie: as in ``api.attend``."""

    rows: Float[Array, "pool page row_dim"]
    pages: Int[Array, "rows pages"] | None
    lengths: Int[Array, " rows"]


def attend(
    query: Float[Array, "rows tokens heads query_dim"],
    cached: Cached,
    expand: Matrix,
    positions: Int[Array, "rows tokens"],
    *,
    nope_dim: int,
    interpret: bool,
) -> Float[Array, "rows tokens heads value_dim"]:
    """See ``api.attend``."""
    room = capacity(cached.rows, cached.pages)
    tiles = max(1, BLOCK // (query.shape[0] * EXPAND_ROWS))
    block = min(tiles, pl.cdiv(room, EXPAND_ROWS)) * EXPAND_ROWS

    def step(index: Any, state: Running | None) -> Running:
        index = jnp.reshape(index, (1,))
        expanded = expand_rows(cached, expand, index, block, interpret)
        return attend_block(query, expanded, cached, positions, index, state, expand, nope_dim, interpret)

    # the first block writes the state that the others carry on: zeros would be written only to be read
    state = step(jnp.int32(0), None)
    if block < room:
        longest = jnp.minimum(jnp.max(cached.lengths, initial=0), room)
        state = jax.lax.fori_loop(1, pl.cdiv(longest, block), step, state)
    return state.value / jnp.where(state.weight > 0, state.weight, 1.0)[..., None]


def expand_rows(
    cached: Cached,
    expand: Matrix,
    index: Int[Array, " 1"],
    block: int,
    interpret: bool,
) -> Float[Array, "rows block heads_by_kv"]:
    """Per-head keys and values of block ``index`` of the cached rows; tiles without a written row stay unwritten."""
    rows, width, latent = cached.lengths.shape[0], *expand.shape
    page, room = cached.rows.shape[1], capacity(cached.rows, cached.pages)
    # a tile never leaves a page
    size = EXPAND_ROWS if cached.pages is None else math.gcd(EXPAND_ROWS, page)
    columns, inner = min(EXPAND_COLUMNS, padded(width)), min(EXPAND_INNER, padded(latent))

    def kernel(cached_ref: Any, expand_ref: Any, index_ref: Any, out_ref: Any) -> None:
        cache_ref, pages_ref, lengths_ref = cached_ref
        part, tile, row = (pl.program_id(axis) for axis in range(3))
        first, length = index_ref[0] * block + tile * size, jnp.minimum(lengths_ref[row], room)

        @pl.when(first < length)
        def _() -> None:
            s, c = span(0, size)[:, None], span(part * columns, columns)
            held, offset = locate(pages_ref, row, first, page)
            at = held, offset + s
            fits = limit(width, columns)

            def add(index: Any, sum_sc: Any) -> Any:
                r = span(index * inner, inner)[None]
                rest = limit(latent, inner)
                latent_sr = load(cache_ref, *at, r, limits=(None, None, rest), where=first + s < length)
                w_cr = load_expand(expand_ref, c[:, None], r, limits=(fits, rest))
                return sum_sc + dot(latent_sr.astype(expand.dtype), w_cr, (1, 1))

            sum_sc = jax.lax.fori_loop(0, pl.cdiv(latent, inner), add, jnp.zeros((size, columns), jnp.float32))
            column = c[None]
            plt.store(out_ref.at[row, tile * size + s, column], sum_sc.astype(expand.dtype), mask=column < width)

    return launch(
        kernel,
        "mla_expand",
        (pl.cdiv(width, columns), block // size, rows),
        jax.ShapeDtypeStruct((rows, block, width), expand.dtype),
        cached,
        expand,
        index,
        interpret=interpret,
        stages=2,
    )


def attend_block(
    query: Float[Array, "rows tokens heads query_dim"],
    expanded: Float[Array, "rows block heads_by_kv"],
    cached: Cached,
    positions: Int[Array, "rows tokens"],
    index: Int[Array, " 1"],
    state: Running | None,
    expand: Matrix,
    nope_dim: int,
    interpret: bool,
) -> Running:
    """The softmax state with block ``index`` of the cached rows added; ``state`` is updated in place."""
    rows, tokens, heads, query_dim = query.shape
    block, latent, per_head = expanded.shape[1], expand.shape[1], expand.shape[0] // heads
    value_dim, shared = per_head - nope_dim, query_dim - nope_dim
    page, room = cached.rows.shape[1], capacity(cached.rows, cached.pages)
    size = min(QUERIES, padded(tokens))
    wide = padded(value_dim)

    def kernel(
        before: Any,
        query_ref: Any,
        expanded_ref: Any,
        cached_ref: Any,
        positions_ref: Any,
        index_ref: Any,
        top_ref: Any,
        weight_ref: Any,
        value_ref: Any,
    ) -> None:
        cache_ref, pages_ref, lengths_ref = cached_ref
        part, head, row = (pl.program_id(axis) for axis in range(3))
        t, d, k, v = span(part * size, size), span(0, padded(nope_dim)), span(0, padded(shared)), span(0, wide)
        tail = limit(tokens, size)
        position_t = load(positions_ref, row, t, limits=(None, tail), other=-1)
        first = index_ref[0] * block
        length = jnp.minimum(lengths_ref[row], room)
        end = jnp.minimum(jnp.minimum(first + block, length), jnp.max(position_t) + 1)
        own_td = load(query_ref, row, t[:, None], head, d[None], limits=(None, tail, None, limit(nope_dim)))
        shared_tk = load(
            query_ref, row, t[:, None], head, nope_dim + k[None], limits=(None, tail, None, limit(shared) and query_dim)
        )
        own_td, shared_tk = own_td.astype(expand.dtype), shared_tk.astype(expand.dtype)
        is_value, is_key = limit(value_dim), limit(nope_dim)

        def tile(step: Any, state: Any) -> Any:
            top_t, weight_t, value_tv = state
            at = first + step * TILE
            s = span(0, TILE)
            written = at + s < end
            inside = step * TILE + s[:, None]
            key_sd = load(
                expanded_ref, row, inside, head, d[None], limits=(None, None, None, is_key), where=written[:, None]
            )
            value_sv = load(
                expanded_ref,
                row,
                inside,
                head,
                nope_dim + v[None],
                limits=(None, None, None, is_value and per_head),
                where=written[:, None],
            )
            held, offset = locate(pages_ref, row, at, page)
            shared_sk = load(
                cache_ref,
                held,
                offset + s[:, None],
                latent + k[None],
                limits=(None, None, limit(shared) and latent + shared),
                where=written[:, None],
            )
            score_ts = dot(own_td, key_sd, (1, 1)) + dot(shared_tk, shared_sk.astype(expand.dtype), (1, 1))
            seen = written[None] & ((at + s)[None] <= position_t[:, None])
            score_ts = jnp.where(seen, score_ts * (query_dim**-0.5 * LOG2_E), MASKED)
            new_t = jnp.maximum(top_t, jnp.max(score_ts, axis=1))
            weight_ts = jnp.where(seen, jnp.exp2(score_ts - new_t[:, None]), 0.0)
            fade_t = jnp.exp2(top_t - new_t)
            added_tv = dot(weight_ts.astype(expand.dtype), value_sv, (1, 0))
            return new_t, weight_t * fade_t + jnp.sum(weight_ts, axis=1), value_tv * fade_t[:, None] + added_tv

        there = (t < tokens)[:, None] & (v < value_dim)[None]
        if before is not None:
            start = (
                load(before[0], row, t, head, limits=(None, tail, None), other=MASKED),
                load(before[1], row, t, head, limits=(None, tail, None)),
                load(before[2], row, t[:, None], head, v[None], limits=(None,) * 4, where=there),
            )
        else:
            start = (
                jnp.full((size,), MASKED, jnp.float32),
                jnp.zeros((size,), jnp.float32),
                jnp.zeros((size, wide), jnp.float32),
            )
        top_t, weight_t, value_tv = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - first, 0), TILE), tile, start)
        plt.store(top_ref.at[row, t, head], top_t, mask=t < tokens)
        plt.store(weight_ref.at[row, t, head], weight_t, mask=t < tokens)
        plt.store(value_ref.at[row, t[:, None], head, v[None]], value_tv, mask=there)

    by_head = jax.ShapeDtypeStruct((rows, tokens, heads), jnp.float32)
    return Running(
        *launch(
            kernel,
            "mla_attend_block",
            (pl.cdiv(tokens, size), heads, rows),
            (by_head, by_head, jax.ShapeDtypeStruct((rows, tokens, heads, value_dim), jnp.float32)),
            state,
            query,
            expanded.reshape(rows, block, heads, per_head),
            cached,
            positions,
            index,
            interpret=interpret,
            stages=2,
            aliases=None if state is None else {part: part for part in range(3)},
        )
    )
