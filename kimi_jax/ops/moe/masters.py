"""The routed experts as float masters: every pair of token and expert in batched products, differentiable.

Pairs are sorted by expert and each expert takes its own in rounds of equally many rows. The first round holds all of a balanced
batch and keeps what its gradient needs; later rounds happen only where an expert is asked more often, and are run again for it.
Nothing is dropped. A gather's gradient is the gather of the inverse order: XLA for CPU scatters row by row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kimi_jax.ops.moe.reference import sort_pairs
from kimi_jax.ops.moe.weights import ExpertMasters
from kimi_jax.ops.situ import api as situ_op

SPARE = 1.25
"""Rows of a round over the mean number of an expert's pairs."""

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class _Sorted(NamedTuple):
    """Pairs (token * top_k + place) by expert.

    Attributes:
      pair: pair at each place of the order.
      start, held: where an expert's begin, and how many there are.
      expert, rank: of each pair: its local expert (past the last for one that is not here), and its place among that expert's.
    """

    pair: Int[Array, " pairs"]
    start: Int[Array, " experts"]
    held: Int[Array, " experts"]
    expert: Int[Array, "tokens top_k"]
    rank: Int[Array, "tokens top_k"]


class _Moves(NamedTuple):
    """One round: the pair in each row of each expert (past the last where there is none), and the row of each pair, likewise."""

    pair: Int[Array, "experts rows"]
    row: Int[Array, "tokens top_k"]


def experts(
    z: Float[Array, "tokens latent"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertMasters,
    *,
    beta: float,
    linear_beta: float | None,
    first_expert: int | Int[Array, ""],
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``; gradients flow to ``z``, ``weights`` and ``w``."""
    local = w.w1.shape[0]
    rows = round_rows(ids.size, local)
    order = _sort(ids, first_expert, local)
    one = partial(_round, rows=rows, beta=beta, linear_beta=linear_beta)
    later: Array = _later_rounds(one, rows, z, weights, w, order)
    return one(z, weights, w, order, jnp.int32(0)) + later


def round_rows(pairs: int, local: int) -> int:
    """Rows that every expert takes at once: ``SPARE`` times the mean, in whole vectors of 8, at most all pairs."""
    return min(-(-int(pairs * SPARE) // (8 * local)) * 8, max(pairs, 1))


def _sort(ids: Int[Array, "tokens top_k"], first_expert: int | Int[Array, ""], local: int) -> _Sorted:
    expert, pair = (x[:-1] for x in sort_pairs(ids, first_expert, local, 1))
    bounds = jnp.searchsorted(expert, jnp.arange(local + 1)).astype(jnp.int32)
    place = jnp.zeros(ids.size, jnp.int32).at[pair].set(jnp.arange(ids.size, dtype=jnp.int32), unique_indices=True)
    own = ids - first_expert
    own = jnp.where((own < 0) | (own >= local), local, own)
    return _Sorted(pair, bounds[:-1], bounds[1:] - bounds[:-1], own, place.reshape(ids.shape) - bounds[own])


def _round(
    z: Float[Array, "tokens latent"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertMasters,
    order: _Sorted,
    number: Int[Array, ""],
    *,
    rows: int,
    beta: float,
    linear_beta: float | None,
) -> Float[Array, "tokens latent"]:
    """What the pairs of round ``number`` add, float32."""
    local, pairs = w.w1.shape[0], order.pair.size
    rank = number * rows + jnp.arange(rows)
    pair = order.pair[jnp.clip(order.start[:, None] + rank, 0, pairs - 1)]
    inside = order.rank - number * rows
    here = (order.expert < local) & (inside >= 0) & (inside < rows)
    moves = _Moves(
        jnp.where(rank < order.held[:, None], pair, pairs),
        jnp.where(here, order.expert * rows + inside, local * rows),
    )
    x = _to_rows(z, moves)
    w1, w3, w2 = (matrix.astype(z.dtype) for matrix in w)
    gate, up = (einsum("erl,efl->erf", x, matrix, preferred_element_type=jnp.float32) for matrix in (w1, w3))
    hidden = situ_op.situ(gate, up, beta, linear_beta).astype(z.dtype)
    out = einsum("erf,elf->erl", hidden, w2, preferred_element_type=jnp.float32).astype(z.dtype)
    return einsum("tkl,tk->tl", _to_pairs(out, moves).astype(jnp.float32), weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later_rounds(
    one: Any, rows: int, z: Array, weights: Array, w: ExpertMasters, order: _Sorted
) -> Float[Array, "tokens latent"]:
    """All rounds after the first; none in a balanced batch."""
    start = (jnp.int32(1), jnp.zeros(z.shape, jnp.float32))
    more = partial(_more, rows, order)
    return lax.while_loop(more, lambda s: (s[0] + 1, s[1] + one(z, weights, w, order, s[0])), start)[1]


def _more(rows: int, order: _Sorted, state: tuple[Array, Any]) -> Array:
    return state[0] * rows < jnp.max(order.held)


def _later_forward(one: Any, rows: int, z: Array, weights: Array, w: ExpertMasters, order: _Sorted) -> tuple[Any, Any]:
    return _later_rounds(one, rows, z, weights, w, order), (z, weights, w, order)


def _later_backward(one: Any, rows: int, kept: Any, out: Array) -> tuple[Any, ...]:
    *inputs, order = kept

    def add(state: tuple[Array, Any]) -> tuple[Array, Any]:
        number, sums = state
        _, back = jax.vjp(lambda *given: one(*given, order, number), *inputs)
        return number + 1, jax.tree.map(jnp.add, sums, back(out))

    start = (jnp.int32(1), tuple(jax.tree.map(jnp.zeros_like, inputs)))
    return *lax.while_loop(partial(_more, rows, order), add, start)[1], None


_later_rounds.defvjp(_later_forward, _later_backward)


@jax.custom_vjp
def _to_rows(z: Float[Array, "tokens latent"], moves: _Moves) -> Float[Array, "experts rows latent"]:
    """The token of every row; zeros in empty rows."""
    return _take(z, moves.pair // moves.row.shape[1])


_to_rows.defvjp(
    lambda z, moves: (_to_rows(z, moves), moves),
    lambda moves, rows: (jnp.sum(_take(_flat(rows), moves.row), axis=1), None),
)


@jax.custom_vjp
def _to_pairs(rows: Float[Array, "experts rows latent"], moves: _Moves) -> Float[Array, "tokens top_k latent"]:
    """The row of every pair; zeros for pairs of other rounds."""
    return _take(_flat(rows), moves.row)


_to_pairs.defvjp(
    lambda rows, moves: (_to_pairs(rows, moves), moves),
    lambda moves, pairs: (_take(_flat(pairs), moves.pair), None),
)


def _take(x: Float[Array, "held latent"], index: Int[Array, "*shape"]) -> Float[Array, "*shape latent"]:
    """Rows of ``x``; zeros where the index is past the last."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _flat(x: Float[Array, "a b latent"]) -> Float[Array, "rows latent"]:
    return x.reshape(-1, x.shape[-1])
