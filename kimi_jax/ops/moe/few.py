"""The routed experts of few tokens, where time is the bytes of the touched experts: two launches.

Nothing is sorted. Up: one program per (token, expert) pair and columns; of the pairs that share an expert the first
gathers the rows of all. Down: one program per token and columns meets all experts of the token in one product, the
pairs as its rows and the experts' columns side by side; its diagonal blocks are the outputs, summed in a fixed order.
A row's result does not depend on what else is in its batch, as long as both have up to 16 rows or both more.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.moe.products import Product, product
from kimi_jax.ops.moe.tiles import TilePlan, power_of_two
from kimi_jax.ops.moe.weights import ExpertWeights
from kimi_jax.ops.situ import api as situ_op

ROWS = 16
"""Fewest rows of a matrix instruction."""

UP = TilePlan(columns=32, inner=256, warps=2)
UP_LONG = TilePlan(columns=32, inner=512, warps=2)
"""Twice the bytes under way, for few programs; it needs the registers that decoding and gathering would use."""

DOWN = TilePlan(columns=16, inner=128, warps=4)


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
    interpret: bool,
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``; ``first`` is the id of the first expert in ``w``."""
    local, ffn = w.w1_packed.shape[:2]
    tokens, latent = z.shape
    long = tokens <= ROWS and way != "decoded"
    up, down = (UP_LONG if long else UP).fit(ffn, latent), DOWN.fit(latent, ffn)
    hidden = pl.pallas_call(
        partial(_up, local=local, beta=beta, linear_beta=linear_beta, way=way, tile=up),
        grid=(ffn // up.columns, ids.size),
        out_shape=jax.ShapeDtypeStruct((ids.size, ffn), z.dtype),
        name="moe_up",
        **up.options(interpret),
    )(first, ids, z, w.w1_packed, w.w1_scale, w.w3_packed, w.w3_scale)
    return pl.pallas_call(
        partial(_down, local=local, way=way, tile=down),
        grid=(tokens, latent // down.columns),
        out_shape=jax.ShapeDtypeStruct((tokens, latent), jnp.float32),
        name="moe_down",
        **down.options(interpret),
    )(first, ids, weights, hidden, w.w2_packed, w.w2_scale)


def _up(
    first_ref, ids_ref, z_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref, *, local, beta, linear_beta,
    way, tile,
):  # fmt: skip
    tokens, top_k = ids_ref.shape
    nobody = tokens * top_k  # past the last pair: what masked lanes point at
    start, pair = pl.program_id(0) * tile.columns, pl.program_id(1)
    expert = ids_ref[pair // top_k, pair % top_k]
    token_T, place_K = jnp.arange(max(ROWS, power_of_two(tokens))), jnp.arange(power_of_two(top_k))
    real_TK = (token_T < tokens)[:, None] & (place_K < top_k)[None, :]
    ids_TK = plt.load(ids_ref.at[token_T[:, None], place_K[None, :]], mask=real_TK, other=-1)
    pair_TK = token_T[:, None] * top_k + place_K[None, :]
    mine_TK = real_TK & (ids_TK == expert)
    leads = pair == jnp.min(jnp.where(mine_TK, pair_TK, nobody))
    position = expert - first_ref[0]

    @pl.when(leads & (position >= 0) & (position < local))
    def _():
        pair_T = jnp.max(jnp.where(mine_TK, pair_TK, -1), axis=1)
        rank_T = jnp.cumsum((pair_T >= 0).astype(jnp.int32)) - 1
        columns = pl.ds(start, tile.columns)

        def rows(skipped):
            picked_RT = (rank_T[None, :] == skipped + jnp.arange(ROWS)[:, None]) & (pair_T >= 0)[None, :]
            pair_R = jnp.min(jnp.where(picked_RT, pair_T[None, :], nobody), axis=1)
            token_R, kept_R1 = pair_R // top_k, (pair_R < nobody)[:, None]

            def step(index, sums):
                inner_K = index * tile.inner + jnp.arange(tile.inner)
                x_RK = plt.load(z_ref.at[token_R[:, None], inner_K[None, :]], mask=kept_R1, other=0)
                packed, scales = tile.packed(index), tile.scales(index)
                return tuple(
                    total + product(x_RK, codes[position, columns, packed], scale[position, columns, scales], way)
                    for total, codes, scale in zip(
                        sums, (gate_ref, up_ref), (gate_scale_ref, up_scale_ref), strict=True
                    )
                )

            zeros = jnp.zeros((ROWS, tile.columns), jnp.float32)
            gate_RN, up_RN = lax.fori_loop(0, z_ref.shape[1] // tile.inner, step, (zeros, zeros))
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
    out_ref[token, pl.ds(pl.program_id(1) * tile.columns, tile.columns)] = out_N
