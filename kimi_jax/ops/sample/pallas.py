"""The greedy draw in two launches: every device looks through its slice once, then the slices' few numbers are merged."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.once import once
from kimi_jax.ops.passes import over

BLOCK = 4096
"""Scores that a program holds at once."""


class Best(NamedTuple):
    """A row's best allowed id of each lane, and whether a score of it was not finite."""

    score: Any
    id: Any
    broken: Any


@once
def look(
    logits: Float[Array, "rows local_vocab"], allowed: Bool[Array, " local_vocab"], *, interpret: bool
) -> Int[Array, "rows 4"]:
    """What a slice has to offer: its best id within the slice, whether it is finite, the id's score and the sum of exponentials.

    The sum is relative to the score; both are the bits of a float32, for one gather of integers.
    """
    rows, width = logits.shape
    block = min(BLOCK, pl.next_power_of_2(width))

    def kernel(logits_ref: Any, allowed_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0)

        def load(id_v: Any) -> tuple[Any, Any]:
            """Scores that may be drawn, -inf for the rest; where a score is not finite."""
            here = id_v < width
            score_v = plt.load(logits_ref.at[row, id_v], mask=here, other=0)
            sound_v = jnp.abs(score_v) < jnp.inf
            may_v = plt.load(allowed_ref.at[id_v], mask=here, other=False)
            return jnp.where(may_v & sound_v & here, score_v, -jnp.inf), ~sound_v

        def better(id_v: Any, best: Best) -> Best:
            score_v, broken_v = load(id_v)
            wins_v = score_v > best.score  # a tie stays with the lower id
            ahead = jnp.where(wins_v, score_v, best.score), jnp.where(wins_v, id_v, best.id)
            return Best(*ahead, jnp.maximum(best.broken, broken_v.astype(jnp.int32)))

        nothing = Best(jnp.full(block, -jnp.inf, jnp.float32), jnp.arange(block), jnp.zeros(block, jnp.int32))
        best = over(width, block, better, nothing)
        top = jnp.max(best.score)
        chosen = jnp.min(jnp.where(best.score == top, best.id, width))
        safe = jnp.where(top > -jnp.inf, top, 0.0)
        zeros = jnp.zeros(block, jnp.float32)
        total = jnp.sum(over(width, block, lambda id_v, total_v: total_v + jnp.exp(load(id_v)[0] - safe), zeros))
        out_ref[row, 0] = chosen
        out_ref[row, 1] = 1 - jnp.max(best.broken)
        out_ref[row, 2] = jax.lax.bitcast_convert_type(top, jnp.int32)
        out_ref[row, 3] = jax.lax.bitcast_convert_type(total, jnp.int32)

    params = None if interpret else plt.CompilerParams(num_warps=max(1, block // 256), num_stages=1)
    shape = jax.ShapeDtypeStruct((rows, 4), jnp.int32)
    call = pl.pallas_call(
        kernel, grid=(rows,), out_shape=shape, interpret=interpret, name="look", compiler_params=params
    )
    return call(logits, allowed)


@once
def merge(
    offers: Int[Array, "shards rows 4"], *, width: int, interpret: bool
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Int[Array, " rows"]]:
    """The winner of the slices, its log-probability, and 1 where every slice was finite; a tie goes to the first slice.

    Args:
      width: ids of a slice.
    """
    shards, rows, _ = offers.shape
    lanes = pl.next_power_of_2(shards)

    def kernel(offers_ref: Any, id_ref: Any, logprob_ref: Any, finite_ref: Any) -> None:
        row, shard_s = pl.program_id(0), jnp.arange(lanes)
        here = shard_s < shards
        column = lambda index: plt.load(offers_ref.at[shard_s, row, index], mask=here, other=0)  # noqa: E731
        score = lambda index: jax.lax.bitcast_convert_type(column(index), jnp.float32)  # noqa: E731
        top_s = jnp.where(here, score(2), -jnp.inf)
        peak = jnp.max(top_s)
        safe = jnp.where(peak > -jnp.inf, peak, 0.0)
        winner = jnp.min(jnp.where(top_s == peak, shard_s, lanes))
        id_ref[row] = jnp.sum(jnp.where(shard_s == winner, column(0) + shard_s * width, 0))
        logprob_ref[row] = -jnp.log(jnp.sum(score(3) * jnp.exp(top_s - safe)))
        finite_ref[row] = jnp.min(jnp.where(here, column(1), 1))

    params = None if interpret else plt.CompilerParams(num_warps=1, num_stages=1)
    shapes = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32)]
    call = pl.pallas_call(
        kernel, grid=(rows,), out_shape=shapes, interpret=interpret, name="merge", compiler_params=params
    )
    ids, logprobs, finite = call(offers)
    return ids, logprobs, finite
