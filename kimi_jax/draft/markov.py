"""The sequential part of a draft: a low-rank bias from the token before, and how likely a draft is to stay.

Sources: DSpark notes, section 7 (heads) and section 8 (confidence). All arithmetic is float32: it decides which id is drafted, and
it is the distribution that acceptance compares with.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.product import product


class Joint(NamedTuple):
    """The projection of the gated and of the recurrent head, with its bias."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]


class Drafted(NamedTuple):
    """One drafted block per row.

    Attributes:
      tokens: drafted ids.
      logits: what each was chosen from, the bias included, before any temperature.
      confidence: how likely each is to stay once all before it did; 1 without a confidence head.
    """

    tokens: Int[Array, "rows drafts"]
    logits: Float[Array, "rows drafts vocab"]
    confidence: Float[Array, "rows drafts"]


Bias = Callable[[Array, Array, Array], tuple[Array, Array]]
"""``(embedding of the token before, hidden vector, state)`` -> the vector that meets the output table, the new state."""


def vanilla(e: Float[Array, "rows rank"], h: Float[Array, "rows embed"], state: Array) -> tuple[Array, Array]:
    """The embedding itself."""
    return e, state


def gated(joint: Joint) -> Bias:
    """The embedding behind a gate that also sees the hidden vector."""

    def bias(e: Array, h: Array, state: Array) -> tuple[Array, Array]:
        seen = jnp.concatenate([h.astype(jnp.float32), e], axis=-1)
        return jax.nn.sigmoid(product(seen, joint.weight) + joint.bias) * e, state

    return bias


def recurrent(joint: Joint) -> Bias:
    """A gated state over the whole block, which starts at zero."""

    def bias(e: Array, h: Array, state: Array) -> tuple[Array, Array]:
        joined = product(jnp.concatenate([state, e, h.astype(jnp.float32)], axis=-1), joint.weight) + joint.bias
        keep, new, out = jnp.split(joined, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return jnp.tanh(out), keep * state + (1 - keep) * jnp.tanh(new)

    return bias


def confidence(
    weight: Float[Array, "one in"],
    bias: Float[Array, " one"],
    h: Float[Array, "*rows embed"],
    e: Float[Array, "*rows rank"],
) -> Float[Array, "*rows"]:
    """Probability that what is drafted from ``h`` after the token of embedding ``e`` stays.

    The weight's width says whether ``e`` counts.
    """
    return jax.nn.sigmoid(confidence_logit(weight, bias, h, e))


def confidence_logit(
    weight: Float[Array, "one in"],
    bias: Float[Array, " one"],
    h: Float[Array, "*rows embed"],
    e: Float[Array, "*rows rank"],
) -> Float[Array, "*rows"]:
    """Log odds of :func:`confidence`, as training needs them."""
    seen = h.astype(jnp.float32)
    if weight.shape[1] > seen.shape[-1]:
        seen = jnp.concatenate([seen, e.astype(jnp.float32)], axis=-1)
    return jnp.sum(seen * weight[0].astype(jnp.float32), axis=-1) + bias[0].astype(jnp.float32)


def chain(
    base: Float[Array, "rows drafts vocab"],
    hidden: Float[Array, "rows drafts embed"],
    anchor: Int[Array, " rows"],
    w1: Float[Array, "vocab rank"],
    w2: Float[Array, "vocab rank"],
    choose: Callable[[Float[Array, "rows vocab"], int], Int[Array, " rows"]],
    *,
    bias: Bias = vanilla,
    scale: float = 1.0,
    trust: Callable[[Array, Array], Array] | None = None,
) -> Drafted:
    """Drafts a block token by token, each biased by the one before.

    Args:
      base: scores of every position without the bias, already scaled; -inf where nothing may be drafted.
      hidden: final hidden vectors.
      anchor: the token before the first draft.
      w1, w2: the table that embeds the token before, and the one that scores ids with it.
      choose: ``(scores, place)`` -> the drafted ids.
      bias: the kind of head.
      scale: multiplies the bias.
      trust: ``(hidden, embedding)`` -> confidence.
    """
    token, state = anchor, jnp.zeros((anchor.shape[0], w1.shape[1]), jnp.float32)
    tokens, logits, trusted = [], [], []
    for place in range(base.shape[1]):
        e, h = w1[token].astype(jnp.float32), hidden[:, place]
        meets, state = bias(e, h, state)
        scores = base[:, place] + scale * product(meets, w2)
        trusted.append(jnp.ones(e.shape[0]) if trust is None else trust(h, e))
        token = choose(scores, place)
        tokens.append(token)
        logits.append(scores)
    return Drafted(*(jnp.stack(parts, axis=1) for parts in (tokens, logits, trusted)))
