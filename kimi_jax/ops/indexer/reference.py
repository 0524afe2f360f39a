"""The sparse indexer for XLA: a loop over blocks of keys, heads reduced within each, then a sort for the largest.

The trip count follows the furthest position, so one compiled program serves every length and reads what is written.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.indexer.keys import IndexCache, decode

BLOCK_BYTES = 32 << 20
"""Scores of single heads that exist at once."""

FEWEST, MOST = 128, 4096
"""Keys read per step."""

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def scores(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    pages: Int[Array, "rows pages"] | None = None,
) -> Float[Array, "rows tokens length"]:
    """See ``api.scores``."""
    rows, tokens, heads, _ = q.shape
    wide, page = q.astype(jnp.float32), index.keys.shape[1]
    room = page if pages is None else page * pages.shape[1]
    size = _block(rows * tokens * heads, room, 1 if pages is None else page)

    def block(turn: Int[Array, ""], out: Float[Array, "rows tokens length"]) -> Float[Array, "rows tokens length"]:
        # the last block is shifted back when the room is no multiple of it; what it scores again comes out the same
        start = jnp.minimum(turn * size, room - size)
        keys = decode(_read(index, pages, start, size))
        product = einsum("bthd,bsd->bths", wide, keys)
        score = einsum("bths,bth->bts", jax.nn.relu(product), w.astype(jnp.float32))
        seen = start + jnp.arange(size) <= positions[..., None]
        return jax.lax.dynamic_update_slice(out, jnp.where(seen, score, -jnp.inf), (0, 0, start))

    trips = -(-(jnp.max(positions, initial=-1) + 1) // size)
    return jax.lax.fori_loop(0, trips, block, jnp.full((rows, tokens, room), -jnp.inf, jnp.float32))


def top_k(scores: Float[Array, "*queries length"], k: int) -> Int[Array, "*queries k"]:
    """See ``api.top_k``."""
    length = scores.shape[-1]
    # not `scores + 0.0`, which a compiler may drop
    values, chosen = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), min(k, length))
    chosen = jnp.sort(jnp.where(values == -jnp.inf, length, chosen), axis=-1)
    chosen = jnp.where(chosen == length, -1, chosen).astype(jnp.int32)
    return jnp.pad(chosen, [(0, 0)] * (scores.ndim - 1) + [(0, k - chosen.shape[-1])], constant_values=-1)


def select(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    pages: Int[Array, "rows pages"] | None = None,
    *,
    k: int,
) -> Int[Array, "rows tokens k"]:
    """See ``api.select``; all queries at once."""
    return top_k(scores(q, w, index, positions, pages), k)


def _block(queries: int, room: int, page: int) -> int:
    """Keys per step: whole pages, no more than there are."""
    fits = min(max(BLOCK_BYTES // (4 * queries), FEWEST), MOST)
    return min(max(1, fits // page) * page, room)


def _read(index: IndexCache, pages: Int[Array, "rows pages"] | None, start: Int[Array, ""], size: int) -> IndexCache:
    """``size`` keys of every sequence from ``start`` on, as they are held."""

    def read(held: Array) -> Array:
        if pages is None:
            return jax.lax.dynamic_slice_in_dim(held, start, size, axis=1)
        page = held.shape[1]
        some = jax.lax.dynamic_slice_in_dim(pages, start // page, size // page, axis=1)
        return held[some].reshape(pages.shape[0], size, *held.shape[2:])

    return jax.tree.map(read, index)
