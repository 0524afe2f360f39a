"""Which drafted tokens a verification keeps: the greedy, the token and the block rule (DSpark notes, section 9).

Verification has scored the anchor and ``length`` drafted tokens, which gives ``length + 1`` target distributions. A rule decides
how many drafts stay and from which weights the token after them is drawn. Every rule leaves the law of the output that of the
target alone. Everything is batched over rows of different lengths, in float32, without a branch on what is accepted.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rule = Literal["token", "block"]

TINY = float(jnp.finfo(jnp.float32).tiny)
"""Stands for a proposal probability of zero under a logarithm."""


class Accepted(NamedTuple):
    """The verdict on one block per row.

    Attributes:
      kept: drafts that stay, from the first one on.
      weights: of the token after them, not normalised.
    """

    kept: Int[Array, " rows"]
    weights: Float[Array, "rows vocab"]


class Chain(NamedTuple):
    """What the block rule computes on its way, [rows, drafts]: the joint ratio, the mass left over, the acceptance probability."""

    ratio: Float[Array, "rows drafts"]
    residual: Float[Array, "rows drafts"]
    accept: Float[Array, "rows drafts"]


def proposed(drafts: Int[Array, "rows drafts"], lengths: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Drafts that count: ``lengths`` of them, fewer where a placeholder (-1) stands before; it ends its block."""
    real = jnp.cumprod(drafts >= 0, axis=1)
    return jnp.minimum(jnp.sum(real, axis=1, dtype=jnp.int32), lengths.astype(jnp.int32))


def greedy(
    best: Int[Array, "rows drafts_and_one"], drafts: Int[Array, "rows drafts"], lengths: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Drafts kept at temperature 0: those before the first that is not the target's ``best``. The next token is ``best[count]``."""
    same = jnp.cumprod(_inside(drafts, proposed(drafts, lengths)) & (best[:, :-1] == drafts), axis=1)
    return jnp.sum(same, axis=1, dtype=jnp.int32)


def accept(
    rule: Rule,
    p: Float[Array, "rows drafts_and_one vocab"],
    q: Float[Array, "rows drafts vocab"],
    drafts: Int[Array, "rows drafts"],
    lengths: Int[Array, " rows"],
    u: Float[Array, "rows drafts"],
) -> Accepted:
    """The verdict of one of the two random rules.

    Args:
      rule: ``token`` stops at the first rejection; ``block`` tests every prefix and keeps at least as many on average.
      p: target distributions after temperature, top-k, top-p and masks; row ``i`` decides draft ``i``.
      q: what each draft was really drawn from: one-hot for a draft taken as the likeliest.
      drafts: drafted ids, -1 for a placeholder.
      lengths: drafts that were verified; rows of ``p`` and ``q`` beyond may hold anything finite.
      u: uniforms of this step alone, independent of those that drew the drafts and of the ones of every other step.
    """
    lengths = proposed(drafts, lengths)
    count, scale = (_token if rule == "token" else _block)(p, q, drafts, lengths, u)
    after_p = jnp.take_along_axis(p, count[:, None, None], axis=1)[:, 0]
    row = jnp.minimum(count, max(q.shape[1] - 1, 0))
    after_q = jnp.take_along_axis(q, row[:, None, None], axis=1)[:, 0] if q.shape[1] else jnp.zeros_like(after_p)
    # with nothing rejected the token comes from the target itself, also where more was drafted than verified
    short = (count < lengths)[:, None]
    weights = jnp.where(short, jnp.maximum(scale[:, None] * after_p - after_q, 0), after_p)
    some = jnp.sum(weights, axis=1, keepdims=True) > 0  # nothing is left only where p is q
    return Accepted(count, jnp.where(some, weights, after_p))


def block_chain(
    p: Float[Array, "rows drafts_and_one vocab"],
    q: Float[Array, "rows drafts vocab"],
    drafts: Int[Array, "rows drafts"],
    lengths: Int[Array, " rows"],
) -> Chain:
    """Ratios, residual masses and acceptance probabilities of the block rule; beyond ``lengths`` they mean nothing."""
    lengths = proposed(drafts, lengths)
    mine, theirs = _of(p[:, :-1], drafts), _of(q, drafts)
    step = jnp.log(jnp.maximum(mine, TINY)) - jnp.log(jnp.maximum(theirs, TINY))
    step = jnp.where(mine > 0, step, -jnp.inf)

    def follow(before: Array, now: Array) -> tuple[Array, Array]:
        ratio = jnp.minimum(before + now, 0.0)
        return ratio, ratio

    _, logs = jax.lax.scan(follow, jnp.zeros(p.shape[0]), step.T)
    ratio = jnp.exp(logs.T)
    # the distributions after draft i: row i + 1 of both; the last one has none and needs none
    residual = jnp.sum(jnp.maximum(ratio[:, :-1, None] * p[:, 1:-1] - q[:, 1:], 0), axis=-1)
    residual = jnp.pad(residual, ((0, 0), (0, 1)))
    under = residual + 1 - ratio
    inner = jnp.where(under > 0, residual / jnp.where(under > 0, under, 1), 1.0)
    last = jnp.arange(drafts.shape[1]) == lengths[:, None] - 1
    return Chain(ratio, residual, jnp.where(last, ratio, inner))


def inverse_cdf(weights: Float[Array, "*rows vocab"], u: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The smallest id whose cumulative weight exceeds ``u`` times the total."""
    below = jnp.cumsum(weights, axis=-1)
    return jnp.argmax(below > u[..., None] * below[..., -1:], axis=-1).astype(jnp.int32)


def gumbel_max(weights: Float[Array, "*rows vocab"], noise: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """An id drawn by its weight, with one standard Gumbel number per id."""
    keyed = jnp.where(weights > 0, jnp.log(jnp.maximum(weights, TINY)) + noise, -jnp.inf)
    return jnp.argmax(keyed, axis=-1).astype(jnp.int32)


def _token(p: Array, q: Array, drafts: Array, lengths: Array, u: Array) -> tuple[Array, Array]:
    kept = _inside(drafts, lengths) & (u * _of(q, drafts) < _of(p[:, :-1], drafts))
    return jnp.sum(jnp.cumprod(kept, axis=1), axis=1, dtype=jnp.int32), jnp.ones(p.shape[0])


def _block(p: Array, q: Array, drafts: Array, lengths: Array, u: Array) -> tuple[Array, Array]:
    if not drafts.shape[1]:
        return jnp.zeros(p.shape[0], jnp.int32), jnp.ones(p.shape[0])
    chain = block_chain(p, q, drafts, lengths)
    kept = _inside(drafts, lengths) & (u <= chain.accept)
    count = jnp.max(jnp.where(kept, jnp.arange(1, drafts.shape[1] + 1), 0), axis=1).astype(jnp.int32)
    ratios = jnp.pad(chain.ratio, ((0, 0), (1, 0)), constant_values=1.0)
    return count, jnp.take_along_axis(ratios, count[:, None], axis=1)[:, 0]


def _inside(drafts: Array, lengths: Array) -> Array:
    return jnp.arange(drafts.shape[1]) < lengths[:, None]


def _of(
    distributions: Float[Array, "rows drafts vocab"], ids: Int[Array, "rows drafts"]
) -> Float[Array, "rows drafts"]:
    """Probability of each id; a placeholder's is that of id 0, which nobody reads."""
    return jnp.take_along_axis(distributions, jnp.maximum(ids, 0)[..., None], axis=-1)[..., 0]
