"""The routed experts of many tokens: pairs grouped by expert, then products of whole tiles of rows.

One launch groups and one goes up; for each block of columns, one comes down, back to its (token, expert) pairs, and one
sums the pairs of a token. No sort and no atomics, so equal calls are bitwise equal; little memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.moe.products import Product, product
from kimi_jax.ops.moe.tiles import TilePlan, dividing, options, power_of_two
from kimi_jax.ops.moe.weights import ExpertWeights
from kimi_jax.ops.situ import api as situ_op

ROWS, FEW_ROWS = 64, 16
"""Rows of a tile: an expert of K3 meets 37 of 2,048 tokens on average, and nine of 512, which fill less of a tile."""

UP = TilePlan(columns=64, inner=128, warps=4)
DOWN = TilePlan(columns=128, inner=128, warps=4)

OUT_COLUMNS = 512
"""Latent columns of all pairs held at once: 32 MiB for 2,048 tokens of 16 experts in bfloat16."""

SCAN = 2048
"""Pairs that the grouping looks at in one step."""


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
    (tokens, top_k), latent = ids.shape, z.shape[1]
    up, down = UP.fit(ffn, latent), DOWN.fit(latent, ffn)
    rows = tile_rows(ids.size, local)
    groups = group(ids, first, local, interpret)
    hidden = pl.pallas_call(
        partial(_up, top_k=top_k, beta=beta, linear_beta=linear_beta, way=way, tile=up, rows=rows),
        grid=(ffn // up.columns, local),
        out_shape=jax.ShapeDtypeStruct((ids.size, ffn), z.dtype),
        name="moe_up_tiles",
        **up.options(interpret),
    )(*groups, z, w.w1_packed, w.w1_scale, w.w3_packed, w.w3_scale)
    width = dividing(latent, OUT_COLUMNS)
    down_to_pairs = pl.pallas_call(
        partial(_down, way=way, tile=down, rows=rows),
        grid=(width // down.columns, local),
        out_shape=jax.ShapeDtypeStruct((ids.size, width), z.dtype),
        name="moe_down_tiles",
        **down.options(interpret),
    )
    # in place, so that one block of columns is held at a time: XLA would sum all blocks at once
    written: list[Array] = []
    for start in range(0, latent, width):
        offset = jnp.array([start], jnp.int32)
        outputs = down_to_pairs(offset, *groups, hidden, w.w2_packed, w.w2_scale)
        add_up = pl.pallas_call(
            partial(_sum, local=local),
            grid=(tokens,),
            out_shape=jax.ShapeDtypeStruct((tokens, latent), jnp.float32),
            input_output_aliases={5: 0} if written else {},
            name="moe_sum",
            **options(1, 1, interpret),
        )
        written = [add_up(offset, first, ids, weights, outputs, *written)]
    return written[0]


def tile_rows(pairs: int, local: int) -> int:
    """Rows of a tile: the fewest of a matrix instruction while no expert held here meets more than that on average."""
    return FEW_ROWS if pairs <= FEW_ROWS * local else ROWS


def group(
    ids: Int[Array, "tokens top_k"], first: Int[Array, " one"], local: int, interpret: bool
) -> tuple[Int[Array, " local"], Int[Array, " local"], Int[Array, " pairs"]]:
    """Pairs (token * top_k + place) by expert and then by number, and where each expert's begin and end.

    Past the last pair that is held here anything may stand.
    """
    pairs = ids.size
    place = jax.ShapeDtypeStruct((local,), jnp.int32)
    return pl.pallas_call(
        partial(_group, scan=min(SCAN, power_of_two(pairs))),
        grid=(local,),
        out_shape=(place, place, jax.ShapeDtypeStruct((pairs,), jnp.int32)),
        name="moe_group",
        **options(4, 1, interpret),
    )(first, ids.reshape(-1))


def _group(first_ref, ids_ref, start_ref, stop_ref, pair_ref, *, scan):
    expert, pairs = pl.program_id(0), ids_ref.shape[0]
    steps = -(-pairs // scan)

    def positions(step):
        pair_P = step * scan + jnp.arange(scan)
        # a pair past the end counts as an expert below the first
        return pair_P, plt.load(ids_ref.at[pair_P], mask=pair_P < pairs, other=-1) - first_ref[0]

    def count(step, counts):
        below_P, mine_P = counts
        _, position_P = positions(step)
        lower_P = (position_P >= 0) & (position_P < expert)
        return below_P + lower_P.astype(jnp.int32), mine_P + (position_P == expert).astype(jnp.int32)

    zeros = jnp.zeros(scan, jnp.int32)
    below_P, mine_P = lax.fori_loop(0, steps, count, (zeros, zeros))
    start, rows = jnp.sum(below_P), jnp.sum(mine_P)
    start_ref[expert], stop_ref[expert] = start, start + rows

    def write(step, at):
        pair_P, position_P = positions(step)
        mine_P = position_P == expert
        place_P = jnp.where(mine_P, at + jnp.cumsum(mine_P.astype(jnp.int32)) - 1, pairs)
        plt.store(pair_ref.at[place_P], pair_P, mask=mine_P)
        return at + jnp.sum(mine_P.astype(jnp.int32))

    @pl.when(rows > 0)
    def _():
        lax.fori_loop(0, steps, write, start)


def _tiles(start_ref, stop_ref, pair_ref, nobody, rows, tile_of):
    """Runs ``tile_of(place_R, pair_R, kept_R1)`` for each tile of ``rows`` pairs of this program's expert.

    ``place_R`` counts grouped pairs; masked rows have ``nobody`` as both, which is past the last.
    """
    expert = pl.program_id(1)
    start, stop = start_ref[expert], stop_ref[expert]

    def tile(index, _):
        place_R = start + index * rows + jnp.arange(rows)
        kept_R = place_R < stop
        place_R = jnp.where(kept_R, place_R, nobody)
        tile_of(place_R, plt.load(pair_ref.at[place_R], mask=kept_R, other=nobody), kept_R[:, None])

    lax.fori_loop(0, (stop - start + rows - 1) // rows, tile, None)


def _up(
    start_ref, stop_ref, pair_ref, z_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref, *, top_k, beta,
    linear_beta, way, tile, rows,
):  # fmt: skip
    start, expert = pl.program_id(0) * tile.columns, pl.program_id(1)
    columns, column_N = pl.ds(start, tile.columns), start + jnp.arange(tile.columns)

    def tile_of(place_R, pair_R, kept_R1):
        token_R = pair_R // top_k

        def step(index, sums):
            inner_K = index * tile.inner + jnp.arange(tile.inner)
            x_RK = plt.load(z_ref.at[token_R[:, None], inner_K[None, :]], mask=kept_R1, other=0)
            packed, scales = tile.packed(index), tile.scales(index)
            return tuple(
                total + product(x_RK, codes[expert, columns, packed], scale[expert, columns, scales], way)
                for total, codes, scale in zip(sums, (gate_ref, up_ref), (gate_scale_ref, up_scale_ref), strict=True)
            )

        zeros = jnp.zeros((rows, tile.columns), jnp.float32)
        gate_RN, up_RN = lax.fori_loop(0, z_ref.shape[1] // tile.inner, step, (zeros, zeros))
        hidden_RN = situ_op.situ(gate_RN, up_RN, beta, linear_beta).astype(hidden_ref.dtype)
        mask = jnp.broadcast_to(kept_R1, hidden_RN.shape)
        plt.store(hidden_ref.at[place_R[:, None], column_N[None, :]], hidden_RN, mask=mask)

    _tiles(start_ref, stop_ref, pair_ref, hidden_ref.shape[0], rows, tile_of)


def _down(offset_ref, start_ref, stop_ref, pair_ref, hidden_ref, codes_ref, scale_ref, out_ref, *, way, tile, rows):
    start, expert = pl.program_id(0) * tile.columns, pl.program_id(1)
    columns, column_N = pl.ds(offset_ref[0] + start, tile.columns), start + jnp.arange(tile.columns)

    def tile_of(place_R, pair_R, kept_R1):
        def step(index, total):
            inner_K = index * tile.inner + jnp.arange(tile.inner)
            x_RK = plt.load(hidden_ref.at[place_R[:, None], inner_K[None, :]], mask=kept_R1, other=0)
            codes, scale = (
                codes_ref[expert, columns, tile.packed(index)],
                scale_ref[expert, columns, tile.scales(index)],
            )
            return total + product(x_RK, codes, scale, way)

        zeros = jnp.zeros((rows, tile.columns), jnp.float32)
        out_RN = lax.fori_loop(0, hidden_ref.shape[1] // tile.inner, step, zeros).astype(out_ref.dtype)
        mask = jnp.broadcast_to(kept_R1, out_RN.shape)
        plt.store(out_ref.at[pair_R[:, None], column_N[None, :]], out_RN, mask=mask)

    _tiles(start_ref, stop_ref, pair_ref, out_ref.shape[0], rows, tile_of)


def _sum(offset_ref, first_ref, ids_ref, weights_ref, pairs_ref, *rest, local):
    total_ref = rest[-1]  # before it the same array, where blocks are in it already
    token, top_k, width = pl.program_id(0), ids_ref.shape[1], pairs_ref.shape[1]
    place_K, column_N = jnp.arange(power_of_two(top_k)), jnp.arange(width)
    position_K = plt.load(ids_ref.at[token, place_K], mask=place_K < top_k, other=0) - first_ref[0]
    held_K = (place_K < top_k) & (position_K >= 0) & (position_K < local)
    pair_K = jnp.where(held_K, token * top_k + place_K, 0)
    # pairs held elsewhere were never written
    out_KN = plt.load(pairs_ref.at[pair_K[:, None], column_N[None, :]], mask=held_K[:, None], other=0)
    weight_K = plt.load(weights_ref.at[token, place_K], mask=held_K, other=0)
    total_ref[token, pl.ds(offset_ref[0], width)] = jnp.sum(weight_K[:, None] * out_KN.astype(jnp.float32), axis=0)
