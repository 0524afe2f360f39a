"""Attention of each token over rows of its own choice: they are gathered where they lie and serve all heads of the token.

Like ``split``, but a program's share is a part of the token's list of positions, and only heads of one token meet in a product.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.launch import dot, launch, limit, load, padded, span
from kimi_jax.ops.mla.launch import TILE, locate_each
from kimi_jax.ops.mla.reference import MASKED
from kimi_jax.ops.mla.split import LOG2_E, PROGRAMS, Shares

HEADS = 16
"""Most heads of one program; with an address for every row, 32 do not fit in its registers (jax 0.12)."""

SHARE = 64
"""Least chosen rows of a program: 2,048 of one token are 32 programs, each with two tiles to hide the latency of a gather."""


def attend(
    query: Float[Array, "rows tokens heads row_dim"],
    cache: Float[Array, "pool page row_dim"],
    selected: Int[Array, "rows tokens k"],
    pages: Int[Array, "rows pages"] | None,
    *,
    latent: int,
    scale: float,
    interpret: bool,
) -> Shares:
    """The shares of every token's attention, all of them written; arguments as in ``sparse.attend_selected_partial``."""
    rows, tokens, heads, row_dim = query.shape
    k, page = selected.shape[2], cache.shape[1]
    size = min(HEADS, padded(heads))
    blocks = pl.cdiv(heads, size)
    most = max(1, min(PROGRAMS // (rows * tokens * blocks), pl.cdiv(k, SHARE)))
    held = pl.cdiv(pl.cdiv(k, most), TILE) * TILE
    shares = pl.cdiv(k, held)
    column, shared = padded(latent), row_dim - latent

    def kernel(query_ref: Any, cache_ref: Any, selected_ref: Any, pages_ref: Any, out_ref: Any, log_ref: Any) -> None:
        at, share, block = (pl.program_id(axis) for axis in range(3))
        row, token = at // tokens, at % tokens
        h, r, c = block * size + span(0, size), span(0, column), latent + span(0, padded(shared))
        is_head, is_latent, is_shared = limit(heads, size), limit(latent), None if limit(shared) is None else row_dim
        own_hr = load(query_ref, row, token, h[:, None], r[None], limits=(None, None, is_head, is_latent))
        shared_hc = load(query_ref, row, token, h[:, None], c[None], limits=(None, None, is_head, is_shared))
        place = span(0, padded(held))
        inside = (place < held) & (share * held + place < k)
        chosen = load(selected_ref, row, token, share * held + place, limits=(None,) * 3, where=inside, other=-1)
        used = jnp.max(jnp.where(chosen >= 0, place + 1, 0))

        def tile(step: Any, state: Any) -> Any:
            top_h, weight_h, value_hr = state
            place = share * held + step * TILE + span(0, TILE)
            position_s = load(selected_ref, row, token, place, limits=(None, None, limit(k, TILE)), other=-1)
            there = position_s >= 0
            in_pool = (each[:, None] for each in locate_each(pages_ref, row, jnp.maximum(position_s, 0), page, there))
            page_s, offset_s = in_pool
            wide = there[:, None]
            latent_sr = load(cache_ref, page_s, offset_s, r[None], limits=(None, None, is_latent), where=wide)
            shared_sc = load(cache_ref, page_s, offset_s, c[None], limits=(None, None, is_shared), where=wide)
            latent_sr = latent_sr.astype(query.dtype)
            score_hs = dot(own_hr, latent_sr, (1, 1)) + dot(shared_hc, shared_sc.astype(query.dtype), (1, 1))
            score_hs = jnp.where(there[None], score_hs * (scale * LOG2_E), MASKED)
            new_h = jnp.maximum(top_h, jnp.max(score_hs, axis=1))
            weight_hs = jnp.where(there[None], jnp.exp2(score_hs - new_h[:, None]), 0.0)
            fade_h = jnp.exp2(top_h - new_h)
            added_hr = dot(weight_hs.astype(query.dtype), latent_sr, (1, 0))
            return new_h, weight_h * fade_h + jnp.sum(weight_hs, axis=1), value_hr * fade_h[:, None] + added_hr

        nothing = (
            jnp.full((size,), MASKED, jnp.float32),
            jnp.zeros((size,), jnp.float32),
            jnp.zeros((size, column), jnp.float32),
        )
        top_h, weight_h, value_hr = jax.lax.fori_loop(0, pl.cdiv(used, TILE), tile, nothing)
        any_h = weight_h > 0
        some_h = jnp.where(any_h, weight_h, 1.0)
        in_order = token * heads + h
        written = (h < heads)[:, None] & (r < latent)[None]
        plt.store(out_ref.at[row, share, in_order[:, None], r[None]], value_hr / some_h[:, None], mask=written)
        log_h = jnp.where(any_h, top_h + jnp.log2(some_h), MASKED)
        plt.store(log_ref.at[row, share, in_order], log_h, mask=h < heads)

    value, log_weight = launch(
        kernel,
        "mla_attend_selected",
        (rows * tokens, shares, blocks),
        (
            jax.ShapeDtypeStruct((rows, shares, tokens * heads, latent), jnp.float32),
            jax.ShapeDtypeStruct((rows, shares, tokens * heads), jnp.float32),
        ),
        query,
        cache,
        selected,
        pages,
        interpret=interpret,
        stages=2,
    )
    return Shares(value, log_weight)
