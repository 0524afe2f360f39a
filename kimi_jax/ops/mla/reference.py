"""Latent attention for XLA: a loop over blocks of cached rows with an online softmax.

The trip count follows the longest sequence, so work and memory grow with what is written, not with what is allocated,
and one compiled program serves every length.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.weights import Matrix, widened

BLOCK = 256
"""Cached rows read per step."""

MASKED = -1e30
"""Score of a hidden row: finite, so that a query that sees nothing gives zeros instead of NaN."""

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Partial(NamedTuple):
    """Softmax state after some rows: running maximum, sum of weights, weighted sum of values (float32)."""

    top: Float[Array, "rows heads tokens"]
    weight: Float[Array, "rows heads tokens"]
    value: Float[Array, "rows heads tokens width"]


def attend(
    query: Float[Array, "rows tokens heads query_dim"],
    cache: Float[Array, "pool page row_dim"],
    expand: Matrix,
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    *,
    nope_dim: int,
    absorbed: bool,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
) -> Float[Array, "rows tokens heads value_dim"]:
    """See ``api.attend``."""
    expand = widened(expand)
    operand = expand.dtype
    per_head = expand.reshape(query.shape[2], -1, expand.shape[1])
    own, shared = query[..., :nope_dim].astype(operand), query[..., nope_dim:].astype(operand)
    if absorbed:
        own = _absorb_own(own, per_head)
    weights = None if absorbed else per_head
    end = _accumulate(own, shared, cache, pages, positions, lengths, weights, query.shape[-1] ** -0.5)
    out = end.value / jnp.maximum(end.weight, jnp.finfo(jnp.float32).tiny)[..., None]
    if absorbed:
        out = einsum("bntr,ndr->btnd", out.astype(operand), per_head)[..., nope_dim:]
    else:
        out = out.transpose(0, 2, 1, 3)
    return out if gate is None else gated(out, gate)


def absorb(
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    *,
    nope_dim: int,
) -> Float[Array, "rows tokens heads row_dim"]:
    """See ``api.absorb``."""
    expand = widened(expand)
    per_head = expand.reshape(query.shape[2], -1, expand.shape[1])
    query = query.astype(expand.dtype)
    return jnp.concatenate([_absorb_own(query[..., :nope_dim], per_head), query[..., nope_dim:]], axis=-1)


def attend_partial(
    query: Float[Array, "rows tokens heads row_dim"],
    cache: Float[Array, "pool page row_dim"],
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    *,
    latent: int,
    scale: float,
    pages: Int[Array, "rows pages"] | None = None,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """See ``api.attend_partial``."""
    own, shared = query[..., :latent], query[..., latent:]
    end = _accumulate(own, shared, cache, pages, positions, lengths, None, scale)
    some = jnp.where(end.weight > 0, end.weight, 1.0)
    log_weight = jnp.where(end.weight > 0, end.top + jnp.log(some), MASKED)
    return (end.value / some[..., None]).swapaxes(1, 2), log_weight.swapaxes(1, 2)


def gated(
    out: Float[Array, "rows tokens heads value_dim"], gate: Float[Array, "rows tokens heads value_dim"]
) -> Float[Array, "rows tokens heads value_dim"]:
    """``out * sigmoid(gate)``, both factors rounded to the gate's dtype."""
    return out.astype(gate.dtype) * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(gate.dtype)


def _absorb_own(
    own: Float[Array, "rows tokens heads nope_dim"], per_head: Float[Array, "heads kv latent"]
) -> Float[Array, "rows tokens heads latent"]:
    # zeros beside the query instead of a slice of the weight, which would be copied at every step
    padded = jnp.pad(own, [(0, 0)] * 3 + [(0, per_head.shape[1] - own.shape[3])])
    return einsum("btnd,ndr->btnr", padded, per_head).astype(per_head.dtype)


def _accumulate(
    own: Float[Array, "rows tokens heads own_dim"],
    shared: Float[Array, "rows tokens heads shared_dim"],
    cache: Float[Array, "pool page row_dim"],
    pages: Int[Array, "rows pages"] | None,
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    per_head: Float[Array, "heads kv latent"] | None,
    scale: float,
) -> Partial:
    """The softmax state after all cached rows, which ``per_head`` expands; without it the queries are absorbed."""
    rows, tokens, heads, own_dim = own.shape
    absorbed, operand, latent = per_head is None, own.dtype, cache.shape[2] - shared.shape[3]
    room, size = _room(cache, pages)
    width = latent if per_head is None else per_head.shape[1] - own_dim

    def block(index: Int[Array, ""], state: Partial) -> Partial:
        # the last block is shifted back when the allocation is no multiple of it; `fresh` hides what was read before
        start = jnp.minimum(index * size, room - size)
        held = _read(cache, pages, start, size)
        at = start + jnp.arange(size)
        fresh = at >= index * size
        written = (at[None] < lengths[:, None]) & fresh
        held = jnp.where(written[..., None], held, jnp.zeros((), held.dtype)).astype(operand)
        keys, values = held[..., :latent], held[..., :latent]
        if per_head is not None:
            expanded = einsum("bsr,ndr->bsnd", held[..., :latent], per_head).astype(operand)
            keys, values = expanded[..., :own_dim], expanded[..., own_dim:]
        seen = written[:, None] & (at[None, None] <= positions[..., None])
        own_score = einsum("btnr,bsr->bnts", own, keys) if absorbed else einsum("btnd,bsnd->bnts", own, keys)
        score = (own_score + einsum("btnd,bsd->bnts", shared, held[..., latent:])) * scale
        return update(state, jnp.where(seen[:, None], score, MASKED), seen[:, None], values, absorbed)

    start = Partial(
        jnp.full((rows, heads, tokens), MASKED, jnp.float32),
        jnp.zeros((rows, heads, tokens), jnp.float32),
        jnp.zeros((rows, heads, tokens, width), jnp.float32),
    )
    trips = -(-jnp.max(lengths, initial=0) // size)
    return jax.lax.fori_loop(0, trips, block, start)


def _room(cache: Float[Array, "pool page row_dim"], pages: Int[Array, "rows pages"] | None) -> tuple[int, int]:
    """Rows that a sequence can hold, and how many of them are read per step: whole pages where there are any."""
    page = cache.shape[1]
    if pages is None:
        return page, min(BLOCK, page)
    return pages.shape[1] * page, min(max(1, BLOCK // page), pages.shape[1]) * page


def _read(
    cache: Float[Array, "pool page row_dim"],
    pages: Int[Array, "rows pages"] | None,
    start: Int[Array, ""],
    size: int,
) -> Float[Array, "rows size row_dim"]:
    """``size`` cached rows of every sequence from ``start`` on."""
    if pages is None:
        return jax.lax.dynamic_slice_in_dim(cache, start, size, axis=1)
    page = cache.shape[1]
    some = jax.lax.dynamic_slice_in_dim(pages, start // page, size // page, axis=1)
    return cache[some].reshape(pages.shape[0], size, cache.shape[2])


def update(state: Partial, score: Any, seen: Any, values: Any, absorbed: bool) -> Partial:
    """Adds one block of scored rows to the softmax state."""
    top = jnp.maximum(state.top, score.max(axis=-1))
    weight = jnp.where(seen, jnp.exp(score - top[..., None]), 0.0)
    fade = jnp.exp(state.top - top)
    added = einsum("bnts,bsr->bntr" if absorbed else "bnts,bsnr->bntr", weight.astype(values.dtype), values)
    return Partial(top, state.weight * fade + weight.sum(axis=-1), state.value * fade[..., None] + added)
