"""The routed experts written for XLA: every touched expert is decoded once, then meets its rows in tiles.

(token, expert) pairs are sorted by expert; an outer loop walks over the experts that occur, an inner one over the rows
of one expert. Trip counts follow the routing: untouched experts cost nothing, nothing is expanded over all of them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kimi_jax.ops.moe.weights import ExpertCodes, ExpertWeights
from kimi_jax.ops.situ import api as situ_op
from kimi_jax.precision import FLOAT32, cpu_projection

FEW_ROWS = 4
"""Mean rows of an expert up to which single vectors beat a matrix product.

Measured on a CPU for 256 x 256: 3 us a vector, 12 us + 0.9 us a row as a product.
"""

TILE_ROWS = (8, 64)
"""Smallest and largest tile of a product; a larger one only pads the last tile of an expert further."""


def experts(
    z: Float[Array, "tokens latent"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertWeights | ExpertCodes,
    *,
    beta: float,
    linear_beta: float | None,
    first_expert: int | Int[Array, ""],
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``."""
    local = w[0].shape[0]
    rows = tile_rows(ids.size, local)
    expert_of, pair_of = sort_pairs(ids, first_expert, local, rows)
    # exact in either; a matrix unit multiplies bfloat16 faster, but not one row
    decoded = cpu_projection() if rows > 1 and z.dtype == jnp.bfloat16 else FLOAT32
    # rows are picked from float32: XLA for CPU widens a narrow array whole before it reads any row of it
    wide, flat_weights = z.astype(jnp.float32), weights.reshape(-1)
    tokens, top_k = ids.shape

    def expert_rows(state: tuple[Array, Array]) -> tuple[Array, Array]:
        expert = expert_of[state[0]]
        w1, w3, w2 = w.products(expert, decoded)

        def tile(state: tuple[Array, Array]) -> tuple[Array, Array]:
            start, total = state
            mine = lax.dynamic_slice(expert_of, (start,), (rows,)) == expert
            pair = lax.dynamic_slice(pair_of, (start,), (rows,))
            token = pair // top_k
            x = wide[token].astype(z.dtype)
            hidden = situ_op.situ(w1(x), w3(x), beta, linear_beta).astype(z.dtype)
            out = w2(hidden).astype(z.dtype).astype(jnp.float32)
            # the tail of the last tile holds other experts' rows, possibly NaN: dropped, never multiplied by zero
            kept = jnp.where(mine, token, tokens)
            total = total.at[kept].add(flat_weights[pair][:, None] * out, mode="drop")
            return start + jnp.sum(mine, dtype=jnp.int32), total

        return lax.while_loop(lambda state: expert_of[state[0]] == expert, tile, state)

    start = (jnp.int32(0), jnp.zeros(z.shape, jnp.float32))
    return lax.while_loop(lambda state: expert_of[state[0]] < local, expert_rows, start)[1]


def tile_rows(pairs: int, local: int) -> int:
    """Rows that meet an expert at once: one for a few pairs per expert, else the power of two below their mean."""
    mean = pairs // local
    if mean <= FEW_ROWS:
        return 1
    return min(max(1 << (mean.bit_length() - 1), TILE_ROWS[0]), TILE_ROWS[1])


def sort_pairs(
    ids: Int[Array, "tokens top_k"], first_expert: int | Int[Array, ""], local: int, rows: int
) -> tuple[Int[Array, " pairs_and_tail"], Int[Array, " pairs_and_tail"]]:
    """Local expert and number of each pair (token * top_k + place), by expert and then by number.

    Pairs of experts that are not here come last, with expert ``local``; so does a tail of ``rows`` entries.

    Raises:
      ValueError: experts times pairs does not fit the sort key.
    """
    pairs = ids.size
    if (local + 1) * pairs >= 2**32:
        raise ValueError(
            f"{pairs} (token, expert) pairs over {local} experts are too many for one call; use shorter chunks"
        )
    position = ids.reshape(-1) - first_expert
    skipped = (position < 0) | (position >= local)
    # one key: a sort of two arrays costs a CPU five times as much
    expert = jnp.where(skipped, local, position).astype(jnp.uint32)
    key = lax.sort(expert * jnp.uint32(pairs) + jnp.arange(pairs, dtype=jnp.uint32))
    tail = jnp.full(rows, local * pairs, jnp.uint32)
    key = jnp.concatenate([key, tail])
    return (key // jnp.uint32(pairs)).astype(jnp.int32), (key % jnp.uint32(pairs)).astype(jnp.int32)
