"""The routed experts of few tokens, where time is the bytes of the touched experts: two launches.

Nothing is sorted. Up: one program per (token, expert) pair and columns; of the pairs that share an expert the first
gathers the rows of all. Down: one program per token and columns meets all experts of the token in one product, the
pairs as its rows and the experts' columns side by side; its diagonal blocks are the outputs, summed in a fixed order.
Of very few tokens each program of the first launch also routes, which costs it less than a launch of its own.
A row's result does not depend on what else is in its batch, as long as both have up to 16 rows or both more.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.moe.products import Product, product
from kimi_jax.ops.moe.router_kernel import choose, order, store
from kimi_jax.ops.moe.sent import Asked, Sent
from kimi_jax.ops.moe.tiles import TilePlan, power_of_two
from kimi_jax.ops.moe.weights import ExpertWeights
from kimi_jax.ops.situ import api as situ_op

ROWS = 16
"""Fewest rows of a matrix instruction."""

UP = TilePlan(columns=32, inner=256, warps=2)
UP_LONG = TilePlan(columns=32, inner=512, warps=2)
"""Twice the bytes under way, for few programs; it needs the registers that decoding, gathering and looking for other tokens' places
would use."""

DOWN = TilePlan(columns=16, inner=128, warps=4)

SCANNED = 2048
"""(token, expert) scores compared at once."""


def experts(
    z: Float[Array, "tokens latent"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertWeights,
    first: Int[Array, " one"],
    *,
    beta: float,
    linear_beta: float | None,
    way: Product,
    dtype: Any,
    interpret: bool,
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``; ``first`` is the id of the first expert in ``w``."""
    asked, tile = Asked(None, z), _up_tile(len(z) <= ROWS, z.shape[1], w, way)
    hidden = pl.pallas_call(
        partial(_up, local=len(w.w1_packed), beta=beta, linear_beta=linear_beta, way=way, tile=tile),
        grid=(w.w1_packed.shape[1] // tile.columns, ids.size),
        out_shape=jax.ShapeDtypeStruct((ids.size, w.w1_packed.shape[1]), z.dtype),
        name="moe_up",
        **tile.options(interpret),
    )(first, ids, asked, *w[:4])
    return _down_call(first, ids, weights, hidden, w, way, dtype, interpret)


def routed_experts(
    asked: Asked | Sent,
    bias: Float[Array, " experts"],
    real: Bool[Array, " tokens"],
    w: ExpertWeights,
    first: Int[Array, " one"],
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    beta: float,
    linear_beta: float | None,
    way: Product,
    dtype: Any,
    interpret: bool,
) -> Float[Array, "tokens latent"]:
    """See ``api.routed_experts``."""
    tokens, _, latent = asked.sizes
    ffn, tile = w.w1_packed.shape[1], _up_tile(tokens == 1, latent, w, way)
    chosen = (tokens, top_k)
    hidden, ids, weights = pl.pallas_call(
        partial(
            _route_up,
            top_k=top_k,
            renormalize=renormalize,
            scale=scale,
            local=len(w.w1_packed),
            beta=beta,
            linear_beta=linear_beta,
            way=way,
            tile=tile,
        ),
        grid=(ffn // tile.columns, tokens * top_k),
        out_shape=(
            jax.ShapeDtypeStruct((tokens * top_k, ffn), asked.dtype),
            jax.ShapeDtypeStruct(chosen, jnp.int32),
            jax.ShapeDtypeStruct(chosen, jnp.float32),
        ),
        name="moe_route_up",
        **tile.options(interpret),
    )(first, asked, bias, real, *w[:4])
    return _down_call(first, ids, weights, hidden, w, way, dtype, interpret)


def _up_tile(few: bool, latent: int, w: ExpertWeights, way: Product) -> TilePlan:
    return (UP_LONG if few and way != "decoded" else UP).fit(w.w1_packed.shape[1], latent)


def _down_call(
    first: Int[Array, " one"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    hidden: Float[Array, "pairs ffn"],
    w: ExpertWeights,
    way: Product,
    dtype: Any,
    interpret: bool,
) -> Float[Array, "tokens latent"]:
    (local, latent), tokens = w.w2_packed.shape[:2], len(ids)
    tile = DOWN.fit(latent, hidden.shape[1])
    return pl.pallas_call(
        partial(_down, local=local, way=way, tile=tile),
        grid=(tokens, latent // tile.columns),
        out_shape=jax.ShapeDtypeStruct((tokens, latent), dtype),
        name="moe_down",
        **tile.options(interpret),
    )(first, ids, weights, hidden, w.w2_packed, w.w2_scale)


def _up(first_ref, ids_ref, asked, *refs, **options):
    tokens, top_k = ids_ref.shape
    pair = pl.program_id(1)
    expert = ids_ref[pair // top_k, pair % top_k]
    token_T, place_K = jnp.arange(max(ROWS, power_of_two(tokens))), jnp.arange(power_of_two(top_k))
    real_TK = (token_T < tokens)[:, None] & (place_K < top_k)[None, :]
    ids_TK = plt.load(ids_ref.at[token_T[:, None], place_K[None, :]], mask=real_TK, other=-1)
    pair_TK = token_T[:, None] * top_k + place_K[None, :]
    pair_T = jnp.max(jnp.where(real_TK & (ids_TK == expert), pair_TK, -1), axis=1)
    _multiply(first_ref, asked, *refs, expert=expert, pair=pair, pair_T=pair_T, size=(tokens, top_k), **options)


def _route_up(
    first_ref, asked, bias_ref, real_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref, ids_ref, weights_ref, *,
    top_k, renormalize, scale, **options,
):  # fmt: skip
    """Every program chooses for its own token, as far as its own place; then it looks where others have put its expert."""
    tokens, experts, _ = asked.sizes
    pair = pl.program_id(1)
    token, place = pair // top_k, pair % top_k
    # the last place of a token knows all of its choices
    writes = (pl.program_id(0) == 0) & (place == top_k - 1)
    id_K, score_K = choose(asked, bias_ref, token, top_k, place + 1)
    id_K = jnp.where(real_ref[token], id_K, experts)

    @pl.when(writes)
    def _():
        store(ids_ref, weights_ref, token, id_K, score_K, renormalize, scale)

    expert = jnp.sum(jnp.where(jnp.arange(id_K.size) == place, id_K, 0))
    token_T = jnp.arange(max(ROWS, power_of_two(tokens)))
    if tokens == 1:
        pair_T = jnp.where(token_T == 0, pair, -1)
    else:
        place_T = _places(asked, bias_ref, jnp.minimum(expert, experts - 1), token_T)
        has_T = plt.load(real_ref.at[token_T], mask=token_T < tokens, other=False) & (place_T < top_k)
        pair_T = jnp.where(has_T & (expert < experts), token_T * top_k + place_T, -1)
    _multiply(
        first_ref, asked, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref,
        expert=expert, pair=pair, pair_T=pair_T, size=(tokens, top_k), **options,
    )  # fmt: skip


def _places(asked, bias_ref, expert, token_T):
    """Place of one expert among those of every token: how many come before it."""
    tokens, experts, _ = asked.sizes
    there_T, size = token_T < tokens, min(power_of_two(experts), SCANNED // token_T.size)
    logits_T = asked.load_logits(token_T, jnp.full_like(token_T, expert), there_T)
    own_T1 = order(jax.nn.sigmoid(logits_T), bias_ref[expert])[:, None]

    def count(step, before_T):
        expert_E = step * size + jnp.arange(size)
        real_E = expert_E < experts
        there_TE = there_T[:, None] & real_E[None, :]
        logits_TE = asked.load_logits(token_T[:, None], expert_E[None, :], there_TE)
        bias_E = plt.load(bias_ref.at[expert_E], mask=real_E, other=0)
        other_TE = order(jax.nn.sigmoid(logits_TE), bias_E[None, :])
        first_TE = (other_TE > own_T1) | ((other_TE == own_T1) & (expert_E < expert)[None, :])
        first_TE &= there_TE & (expert_E != expert)[None, :]
        return before_T + jnp.sum(first_TE.astype(jnp.int32), axis=1)

    return lax.fori_loop(0, pl.cdiv(experts, size), count, jnp.zeros_like(token_T))


def _multiply(
    first_ref, asked, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref, *, expert, pair, pair_T, size, local,
    beta, linear_beta, way, tile,
):  # fmt: skip
    """The hidden rows of all pairs of an expert, if this pair is the first of them; ``pair_T`` of each token, -1 for none."""
    tokens, top_k = size
    nobody = tokens * top_k  # past the last pair: what masked lanes point at
    start = pl.program_id(0) * tile.columns
    leads = pair == jnp.min(jnp.where(pair_T >= 0, pair_T, nobody))
    position = expert - first_ref[0]

    @pl.when(leads & (position >= 0) & (position < local))
    def _():
        rank_T = jnp.cumsum((pair_T >= 0).astype(jnp.int32)) - 1
        columns = pl.ds(start, tile.columns)

        def rows(skipped):
            picked_RT = (rank_T[None, :] == skipped + jnp.arange(ROWS)[:, None]) & (pair_T >= 0)[None, :]
            pair_R = jnp.min(jnp.where(picked_RT, pair_T[None, :], nobody), axis=1)
            token_R, kept_R1 = pair_R // top_k, (pair_R < nobody)[:, None]

            def step(index, sums):
                inner_K = index * tile.inner + jnp.arange(tile.inner)
                x_RK = asked.load_latent(token_R[:, None], inner_K[None, :], kept_R1)
                packed, scales = tile.packed(index), tile.scales(index)
                return tuple(
                    total + product(x_RK, codes[position, columns, packed], scale[position, columns, scales], way)
                    for total, codes, scale in zip(
                        sums, (gate_ref, up_ref), (gate_scale_ref, up_scale_ref), strict=True
                    )
                )

            zeros = jnp.zeros((ROWS, tile.columns), jnp.float32)
            steps = 2 * gate_ref.shape[2] // tile.inner
            gate_RN, up_RN = lax.fori_loop(0, steps, step, (zeros, zeros))
            hidden_RN = situ_op.situ(gate_RN, up_RN, beta, linear_beta).astype(hidden_ref.dtype)
            column_N = start + jnp.arange(tile.columns)
            plt.store(
                hidden_ref.at[pair_R[:, None], column_N[None, :]],
                hidden_RN,
                mask=jnp.broadcast_to(kept_R1, hidden_RN.shape),
            )

        if tokens <= ROWS:
            rows(0)
        else:
            count = jnp.sum((pair_T >= 0).astype(jnp.int32))
            lax.fori_loop(0, (count + ROWS - 1) // ROWS, lambda index, _: rows(index * ROWS), None)


def _down(first_ref, ids_ref, weights_ref, hidden_ref, codes_ref, scale_ref, out_ref, *, local, way, tile):
    top_k, places = ids_ref.shape[1], power_of_two(ids_ref.shape[1])
    token = pl.program_id(0)

    def position_of(place):
        """Local expert of each place, and whether it is held here."""
        position = plt.load(ids_ref.at[token, place], mask=place < top_k, other=0) - first_ref[0]
        held = (place < top_k) & (position >= 0) & (position < local)
        return jnp.where(held, position, 0), held

    row_M = jnp.arange(max(ROWS, places))
    _, held_M = position_of(row_M)
    pair_M = jnp.where(held_M, token * top_k + row_M, 0)
    side_S = jnp.arange(places * tile.columns)  # experts side by side
    position_S, held_S = position_of(side_S // tile.columns)
    column_S = pl.program_id(1) * tile.columns + side_S % tile.columns

    def step(index, total_MS):
        inner_K = index * tile.inner + jnp.arange(tile.inner)
        hidden_MK = plt.load(hidden_ref.at[pair_M[:, None], inner_K[None, :]], mask=held_M[:, None], other=0)
        codes_SK, scale_SG = (
            plt.load(
                ref.at[position_S[:, None], column_S[:, None], (index * width + jnp.arange(width))[None, :]],
                mask=held_S[:, None],
                other=0,
            )
            for ref, width in ((codes_ref, tile.inner // 2), (scale_ref, tile.inner // 32))
        )
        return total_MS + product(hidden_MK, codes_SK, scale_SG, way)

    zeros = jnp.zeros((row_M.size, side_S.size), jnp.float32)
    total_MS = lax.fori_loop(0, hidden_ref.shape[1] // tile.inner, step, zeros)
    out_MS = total_MS.astype(hidden_ref.dtype).astype(jnp.float32)
    place_S = side_S // tile.columns
    weight_S = plt.load(weights_ref.at[token, place_S], mask=held_S, other=0)
    own_MS = (row_M[:, None] == place_S[None, :]) & held_S[None, :]
    weighted_S = jnp.sum(jnp.where(own_MS, weight_S[None, :] * out_MS, 0), axis=0)
    out_N = jnp.sum(weighted_S.reshape(places, tile.columns), axis=0)
    out_ref[token, pl.ds(pl.program_id(1) * tile.columns, tile.columns)] = out_N.astype(out_ref.dtype)
