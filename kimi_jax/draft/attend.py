"""Attention of a drafted block: over the context rows of its request, and over the block itself (DSpark notes, section 6).

One form for both backbones: latent attention is the case of one shared key whose first channels are the value. The rows of the
block live only here; the cache holds committed tokens alone, each request's in a row of its own or in pages of a pool.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.precision import FLOAT32

BLOCK = 8192
"""Context rows that are scored at a time. A cache of no more needs no loop, whose end a GPU would have to read back."""

MASKED = -1e30
"""Score of what is not seen; finite, so that a row of them makes no NaN."""


def attend(
    query: Float[Array, "rows drafts kv_heads group dim"],
    context: tuple[Float[Array, "rows length kv_heads dim"], Float[Array, "rows length kv_heads wide"]],
    block: tuple[Float[Array, "rows drafts kv_heads dim"], Float[Array, "rows drafts kv_heads value"]],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    causal: bool,
    pages: Int[Array, "rows table"] | None = None,
) -> Float[Array, "rows drafts kv_heads group value"]:
    """Softmax over the first ``lengths`` context rows and over the block, all of it or only what is not later.

    Args:
      query: rotated, not scaled.
      context: keys and values of committed tokens, whose first channels count where they are wider than the block's; rows at
        ``lengths`` and beyond may hold anything.
      block: keys and values of the drafted positions.
      lengths: committed tokens of each request; the block starts there.
      scale: of the scores.
      causal: whether a position sees only the block rows up to its own.
      pages: for each request the pages that hold its context rows, in order, -1 for none; ``context`` is then a pool
        [pages, page, ...]. Every row before ``lengths`` must have a page.

    Returns:
      In ``query.dtype``; scores and sums are float32.
    """
    drafts, page = query.shape[1], 1 if pages is None else context[0].shape[1]
    length = context[0].shape[1] if pages is None else pages.shape[1] * page
    size = min(max(BLOCK // page, 1) * page, length)
    at = jnp.arange(drafts)
    own = at[:, None] >= at if causal else jnp.ones((drafts, drafts), bool)
    state = _add(None, query, *block, own[None], scale)

    def step(index: Int[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # the last part may reach back over rows that were counted: they are masked
        start = jnp.minimum(index * size, length - size)
        keys, values = (_part(x, pages, start, size) for x in context)
        values = values[..., : block[1].shape[-1]]
        place = start + jnp.arange(size)
        seen = (place >= index * size) & (place < lengths[:, None])
        return _add(state, query, keys, values, seen[:, None], scale)

    if length == size:
        _, weight, value = step(jnp.int32(0), state)
        return jnp.moveaxis(value / weight[..., None], 3, 1).astype(query.dtype)
    trips = -(-jnp.max(jnp.minimum(lengths, length)) // size)
    _, weight, value = jax.lax.fori_loop(0, trips, step, state)
    return jnp.moveaxis(value / weight[..., None], 3, 1).astype(query.dtype)


def _part(
    held: Float[Array, "pool page_or_length kv_heads dim"],
    pages: Int[Array, "rows table"] | None,
    start: Int[Array, ""],
    size: int,
) -> Float[Array, "rows size kv_heads dim"]:
    """Context rows ``start`` to ``start + size`` of every request; whole pages of a pool."""
    if pages is None:
        return jax.lax.dynamic_slice_in_dim(held, start, size, axis=1)
    page = held.shape[1]
    some = jax.lax.dynamic_slice_in_dim(pages, start // page, size // page, axis=1)
    return held[jnp.maximum(some, 0)].reshape(pages.shape[0], size, *held.shape[2:])


def _add(
    state: tuple[Array, Array, Array] | None, query: Array, keys: Array, values: Array, seen: Array, scale: float
) -> tuple[Array, Array, Array]:
    """The running maximum, weight [rows, kv_heads, group, drafts] and value [..., value] with more rows in."""
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    mask = seen[:, None, None]
    score = jnp.where(mask, _dot("btngd,bsnd->bngts", query, keys) * scale, MASKED)
    top = score.max(axis=-1) if state is None else jnp.maximum(state[0], score.max(axis=-1))
    weights = jnp.where(mask, jnp.exp(score - top[..., None]), 0)
    # what nobody sees may hold anything: zero weight times infinity is no number
    anyone = jnp.any(seen, axis=1)[..., None, None]
    added = _dot("bngts,bsnv->bngtv", weights.astype(values.dtype), jnp.where(anyone, values, 0))
    if state is None:
        return top, weights.sum(axis=-1), added
    fade = jnp.exp(state[0] - top)
    return top, state[1] * fade + weights.sum(axis=-1), state[2] * fade[..., None] + added


def _dot(spec: str, one: Array, other: Array) -> Array:
    exact = jax.lax.Precision.HIGHEST if one.dtype == FLOAT32 else None
    return jnp.einsum(spec, one, other, precision=exact, preferred_element_type=jnp.float32)
