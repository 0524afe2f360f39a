"""Partial results of devices that hold different positions, joined: softmax sums, and the best candidates of a selection.

Source: K3.1 Pro notes, sections 8.2 and 8.3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.context.ownership import Count, Dealt
from kimi_jax.ops.indexer import api as indexer
from kimi_jax.ops.mla.reference import MASKED


def log_sum(logs: Float[Array, "parts ..."]) -> Float[Array, "..."]:
    """The logarithm of the sum of softmax weights of all parts.

    Args:
      logs: natural logarithm of each part's sum; -inf, or anything up to ``MASKED``, where a part holds nothing.

    Returns:
      -inf where no part holds anything.
    """
    some = logs > MASKED
    top = jnp.max(jnp.where(some, logs, MASKED), axis=0)
    total = jnp.sum(jnp.where(some, jnp.exp(logs - top), 0.0), axis=0)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def share(log: Float[Array, "..."], whole: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a part's normalised value is worth beside ``whole`` (:func:`log_sum`); 0 where it holds nothing."""
    some = log > MASKED
    return jnp.where(some, jnp.exp(jnp.where(some, log - whole, 0.0)), 0.0)


def attention(
    value: Float[Array, "parts ... latent"], logs: Float[Array, "parts ..."]
) -> tuple[Float[Array, "... latent"], Float[Array, "..."]]:
    """Attention over all parts and its logarithm, from attention over each; 0 and -inf where no part holds anything."""
    whole = log_sum(logs)
    return jnp.sum(value * share(logs, whole)[..., None], axis=0), whole


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
