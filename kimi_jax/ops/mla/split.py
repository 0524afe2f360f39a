"""Attention of a few queries over very many cached rows: the rows are dealt to programs that see a share each.

A program writes its share's normalised sum of rows and the logarithm of its weight; ``merge`` joins the shares. Cached rows are
read where they lie, through a page table or in a row, in the cache's dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mla.launch import TILE, capacity, dot, launch, limit, load, locate, padded, span
from kimi_jax.ops.mla.reference import MASKED

QUERIES = 32
"""Most queries (token, head) of one program; 64 do not fit in its registers."""

SHARE = 128
"""Least cached rows of a program: fewer would cost more in the merge than they save here."""

UNITS = 256
"""Compute units of an MI355X (sharding/devices), each filled by one program: shares that one sequence is worth."""

PROGRAMS = 4 * UNITS
"""Programs of a batch. The shares of a sequence follow its own length alone, so that what it computes does not depend on its
neighbours; more of them than units let one long sequence use most units while the others are done."""

LOG2_E = 1.4426950408889634


class Shares(NamedTuple):
    """Softmax results of shares of the cached rows.

    Attributes:
      value: sum of rows by weight, divided by the sum of weights; unwritten where a share holds no row of the sequence.
      log_weight: logarithm to base 2 of the sum of weights.
    """

    value: Float[Array, "rows shares queries latent"]
    log_weight: Float[Array, "rows shares queries"]


def share_of(length: Any, shares: int) -> Any:
    """Cached rows of each share of a sequence with ``length`` rows: whole tiles."""
    return jnp.maximum(SHARE, pl.cdiv(pl.cdiv(length, shares), TILE) * TILE)


def attend(
    query: Float[Array, "rows tokens heads row_dim"],
    cache: Float[Array, "pool page row_dim"],
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    pages: Int[Array, "rows pages"] | None,
    *,
    latent: int,
    scale: float,
    interpret: bool,
) -> Shares:
    """The shares of every query's attention; arguments as in ``api.attend_partial``, a page holding whole tiles."""
    rows, tokens, heads, row_dim = query.shape
    count, room = tokens * heads, capacity(cache, pages)
    size = min(QUERIES, padded(count))
    blocks = pl.cdiv(count, size)
    shares = max(1, min(UNITS // blocks, PROGRAMS // (rows * blocks), pl.cdiv(room, SHARE)))
    column = padded(latent)
    shared = row_dim - latent

    def kernel(
        query_ref: Any, cache_ref: Any, positions_ref: Any, lengths_ref: Any, pages_ref: Any, out_ref: Any, log_ref: Any
    ) -> None:
        block, share, row = (pl.program_id(axis) for axis in range(3))
        q, r, k = span(block * size, size), span(0, column), latent + span(0, padded(shared))
        inside = limit(count, size)
        length = jnp.minimum(lengths_ref[row], room)
        held = share_of(length, shares)
        position_q = load(positions_ref, row, q // heads, limits=(None, None), where=q < count, other=-1)
        first = share * held
        end = jnp.minimum(jnp.minimum(first + held, length), jnp.max(position_q) + 1)
        own_qr = load(query_ref, row, q[:, None], r[None], limits=(None, inside, limit(latent)))
        shared_qk = load(
            query_ref, row, q[:, None], k[None], limits=(None, inside, None if limit(shared) is None else row_dim)
        )

        def tile(step: Any, state: Any) -> Any:
            top_q, weight_q, value_qr = state
            start = first + step * TILE
            s = span(start, TILE)
            written = (s < end)[:, None]
            page, offset = locate(pages_ref, row, start, cache.shape[1])
            at = page, span(offset, TILE)[:, None]
            latent_sr = load(cache_ref, *at, r[None], limits=(None, None, limit(latent)), where=written)
            shared_sk = load(
                cache_ref, *at, k[None], limits=(None, None, None if limit(shared) is None else row_dim), where=written
            )
            latent_sr = latent_sr.astype(query.dtype)
            score_qs = dot(own_qr, latent_sr, (1, 1)) + dot(shared_qk, shared_sk.astype(query.dtype), (1, 1))
            seen = (s < end)[None] & (s[None] <= position_q[:, None])
            score_qs = jnp.where(seen, score_qs * (scale * LOG2_E), MASKED)
            new_q = jnp.maximum(top_q, jnp.max(score_qs, axis=1))
            weight_qs = jnp.where(seen, jnp.exp2(score_qs - new_q[:, None]), 0.0)
            fade_q = jnp.exp2(top_q - new_q)
            added_qr = dot(weight_qs.astype(query.dtype), latent_sr, (1, 0))
            return new_q, weight_q * fade_q + jnp.sum(weight_qs, axis=1), value_qr * fade_q[:, None] + added_qr

        @pl.when(first < length)
        def _() -> None:
            nothing = (
                jnp.full((size,), MASKED, jnp.float32),
                jnp.zeros((size,), jnp.float32),
                jnp.zeros((size, column), jnp.float32),
            )
            steps = pl.cdiv(jnp.maximum(end - first, 0), TILE)
            top_q, weight_q, value_qr = jax.lax.fori_loop(0, steps, tile, nothing)
            any_q = weight_q > 0
            value_qr = value_qr / jnp.where(any_q, weight_q, 1.0)[:, None]
            log_q = jnp.where(any_q, top_q + jnp.log2(jnp.where(any_q, weight_q, 1.0)), MASKED)
            there = (q < count)[:, None] & (r < latent)[None]
            plt.store(out_ref.at[row, share, q[:, None], r[None]], value_qr, mask=there)
            plt.store(log_ref.at[row, share, q], log_q, mask=q < count)

    value, log_weight = launch(
        kernel,
        "mla_attend",
        (blocks, shares, rows),
        (
            jax.ShapeDtypeStruct((rows, shares, count, latent), jnp.float32),
            jax.ShapeDtypeStruct((rows, shares, count), jnp.float32),
        ),
        query.reshape(rows, count, row_dim),
        cache,
        positions,
        lengths,
        pages,
        interpret=interpret,
        stages=2,
    )
    return Shares(value, log_weight)
