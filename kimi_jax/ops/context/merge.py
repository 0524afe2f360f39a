"""Partial results of devices that hold different positions, joined: softmax sums, and the best candidates of a selection.

Source: K3.1 Pro notes, sections 8.2 and 8.3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.context.ownership import Count, Dealt
from kimi_jax.ops.indexer import api as indexer
from kimi_jax.ops.mla.reference import MASKED


def shares(logs: Float[Array, "parts ..."]) -> tuple[Float[Array, "parts ..."], Float[Array, "..."]]:
    """What each part of a softmax is worth.

    Args:
      logs: natural logarithm of each part's sum of weights; -inf, or anything up to ``MASKED``, where a part holds nothing.

    Returns:
      The factor of each part's normalised value, and the logarithm of the whole sum. Where no part holds anything: 0 and -inf.
    """
    some = logs > MASKED
    top = jnp.max(jnp.where(some, logs, MASKED), axis=0)
    weight = jnp.where(some, jnp.exp(logs - top), 0.0)
    total = jnp.sum(weight, axis=0)
    found = total > 0
    factor = weight / jnp.where(found, total, 1.0)
    return factor, jnp.where(found, top + jnp.log(jnp.where(found, total, 1.0)), -jnp.inf)


def attention(
    value: Float[Array, "parts ... latent"], logs: Float[Array, "parts ..."]
) -> tuple[Float[Array, "... latent"], Float[Array, "..."]]:
    """Attention over all parts from attention over each (:func:`shares`); zeros where no part holds anything."""
    factor, log = shares(logs)
    return jnp.sum(value * factor[..., None], axis=0), log


def candidates(
    scores: Float[Array, "*queries columns"], chosen: Int[Array, "*queries k"], dealt: Dealt, rank: Count
) -> tuple[Float[Array, "*queries k"], Int[Array, "*queries k"]]:
    """What device ``rank`` hands in of its own columns: scores and positions of the chosen ones, -inf and -1 for none."""
    score = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), axis=-1)
    none = chosen < 0
    return jnp.where(none, -jnp.inf, score), jnp.where(none, -1, dealt.position(chosen, rank))


def selection(
    score: Float[Array, "*queries candidates"],
    position: Int[Array, "*queries candidates"],
    k: int,
    impl: str = "reference",
) -> Int[Array, "*queries k"]:
    """The ``k`` best of all parts' candidates, as one device would choose them: ascending positions, -1 at the end.

    Equal scores: the smaller position; -0.0 equals +0.0. Exact when each part hands in its own best ``k``.

    Args:
      score: -inf where a part has no more candidates.
      position: in the whole sequence; -1 where a part has no more candidates.
    """
    none = jnp.iinfo(jnp.int32).max
    # in the order of positions, the first of equal scores is the one with the smaller position
    position, score = jax.lax.sort((jnp.where(position < 0, none, position), score), num_keys=1, is_stable=False)
    score = jnp.where(position == none, -jnp.inf, score)
    chosen = indexer.top_k(score, k, impl)
    found = jnp.take_along_axis(position, jnp.maximum(chosen, 0), axis=-1)
    return jnp.where(chosen < 0, -1, found)
