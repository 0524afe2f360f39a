"""What a draft is trained for, per drafted position (DSpark notes, sections 8 and 12).

Cross-entropy of the token that came next; the L1 distance of the draft's distribution to the target's; and the cross-entropy of the
confidence with the acceptance that both distributions imply. Everything is float32.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class LossWeights:
    """How the parts add up; the published values.

    Attributes:
      cross_entropy, distance, confidence: of the three parts.
      decay: position ``k`` of a block, from 0, counts ``exp(-k / decay)``: nothing behind the first rejection is of use.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


class Parts(NamedTuple):
    """One number per drafted position; ``acceptance``: the probability that a draft drawn there stays once all before it did."""

    cross_entropy: Float[Array, "*blocks drafts"]
    distance: Float[Array, "*blocks drafts"]
    confidence: Float[Array, "*blocks drafts"]
    acceptance: Float[Array, "*blocks drafts"]


def parts(
    draft: Float[Array, "*blocks drafts vocab"],
    target: Float[Array, "*blocks drafts vocab"],
    following: Int[Array, "*blocks drafts"],
    trust: Float[Array, "*blocks drafts"] | None,
) -> Parts:
    """The three losses and the acceptance of every position.

    Args:
      draft: its scores, the Markov bias included.
      target: its scores after the same tokens. No gradient flows into them.
      following: the token that came next.
      trust: log odds of the confidence head; None where there is none, whose loss is then 0.
    """
    logs = jax.nn.log_softmax(draft.astype(jnp.float32), axis=-1)
    p = jax.nn.softmax(jax.lax.stop_gradient(target).astype(jnp.float32), axis=-1)
    missed = -jnp.take_along_axis(logs, following[..., None], axis=-1)[..., 0]
    distance = jnp.sum(jnp.abs(p - jnp.exp(logs)), axis=-1)
    # 1 - TV = sum(min(p, q)); a label, so what the confidence is wrong about does not move the draft's distribution
    acceptance = jax.lax.stop_gradient(1 - 0.5 * distance)
    unsure = jnp.zeros_like(missed) if trust is None else binary_cross_entropy(trust, acceptance)
    return Parts(missed, distance, unsure, acceptance)


def binary_cross_entropy(
    odds: Float[Array, "*positions"], label: Float[Array, "*positions"]
) -> Float[Array, "*positions"]:
    """Of a probability given as log odds, with a label from 0 to 1; finite for any odds."""
    return jnp.maximum(odds, 0) - odds * label + jnp.log1p(jnp.exp(-jnp.abs(odds)))


def total(
    found: Parts, real: Bool[Array, "*blocks drafts"], weights: LossWeights
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss, and what is worth watching.

    Args:
      real: positions that count.

    Returns:
      The weighted mean over what counts; and ``loss``, its three parts, ``accept`` (mean acceptance) and ``length`` (tokens per
      step that the acceptances promise, 1 + sum of running products, over blocks whose first position counts).
    """
    scale = real * jnp.exp(-jnp.arange(real.shape[-1]) / weights.decay)
    mean = lambda values, over: jnp.sum(values * over) / jnp.maximum(jnp.sum(over), 1e-9)  # noqa: E731
    each = {name: mean(getattr(found, name), scale) for name in ("cross_entropy", "distance", "confidence")}
    loss = jnp.sum(jnp.stack([getattr(weights, name) * value for name, value in each.items()]))
    alive = jnp.cumprod(jnp.where(real, found.acceptance, 0), axis=-1)
    watched = {"accept": mean(found.acceptance, real), "length": 1 + mean(jnp.sum(alive, axis=-1), real[..., 0])}
    return loss, {"loss": loss, **each, **watched}
