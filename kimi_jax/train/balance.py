"""Quantile balancing of the routers' selection bias: no auxiliary loss (training notes, "Router balancing").

For a token with scores ``s`` and selection bias ``b``, let ``alpha`` be the (k+1)-th largest of ``s + b``: expert ``j`` is chosen
where its bias exceeds ``alpha - s[j]``, which is what the token needs. The next bias of an expert is the k/E quantile of what all
tokens of the batch need, so that k/E of them would choose it; then the mean of all biases is taken off. The quantile is read from
a histogram, whose counts are summed over devices and micro-batches. Only training does this; a served bias is fixed.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.layers.latent_moe import LatentMoe

BINS = 1000
"""Uniform bins from the least bias - 1 to the largest + 1: scores lie in 0..1, so no need lies outside."""


def needs(
    scores: Float[Array, "tokens experts"], bias: Float[Array, " experts"], top_k: int
) -> Float[Array, "tokens experts"]:
    """The bias that each token would need for each expert to be among its ``top_k``.

    Raises:
      ValueError: there is no expert past the ``top_k``-th, so nothing to balance.
    """
    if top_k >= scores.shape[-1]:
        raise ValueError(f"top_k is {top_k} of {scores.shape[-1]} experts: every expert is always chosen")
    alpha = lax.top_k(scores + bias, top_k + 1)[0][:, -1:]
    return alpha - scores


def histogram(
    needed: Float[Array, "tokens experts"], bias: Float[Array, " experts"], real: Bool[Array, " tokens"]
) -> Int[Array, "experts bins"]:
    """How many real tokens need a bias in each bin."""
    low, width = _range(bias)
    place = jnp.clip(jnp.floor((needed - low) / width), 0, BINS - 1).astype(jnp.int32)
    experts = bias.shape[0]
    # sorted and searched: XLA for CPU adds into a histogram one entry after another
    placed = jnp.sort(jnp.where(real[:, None], place, BINS), axis=0).T
    below = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(BINS + 1)))(placed)
    assert below.shape == (experts, BINS + 1)
    return (below[:, 1:] - below[:, :-1]).astype(jnp.int32)


def next_bias(
    counts: Int[Array, "experts bins"], bias: Float[Array, " experts"], top_k: int
) -> Float[Array, " experts"]:
    """The balanced bias, of mean zero; a batch without a token changes nothing.

    Args:
      counts: of the whole batch, over all devices.
      bias: the one that ``counts`` was made with.
    """
    low, width = _range(bias)
    total = jnp.sum(counts, axis=-1)
    wanted = total * (top_k / bias.shape[0])
    reached = jnp.cumsum(counts, axis=-1)
    first = jnp.argmax(reached >= wanted[:, None], axis=-1)
    inside = jnp.take_along_axis(counts, first[:, None], axis=-1)[:, 0]
    before = jnp.take_along_axis(reached, first[:, None], axis=-1)[:, 0] - inside
    share = (wanted - before) / jnp.maximum(inside, 1)  # as if the tokens of a bin were spread evenly over it
    quantile = low + (first + share) * width
    return jnp.where(total > 0, quantile - jnp.mean(quantile), bias)


def count_needs(
    moe: LatentMoe, x: Float[Array, "rows tokens embed"], real: Bool[Array, "rows tokens"]
) -> Int[Array, "experts bins"]:
    """The histogram of one layer over the tokens of this device, from the router's input."""
    logits = moe.gate(x.reshape(-1, x.shape[-1]), jnp.float32)
    scores = jax.nn.sigmoid(moe.parallel.all_gather(logits, "router_expert", -1))
    bias = moe.gate.e_score_correction_bias[...]
    return lax.stop_gradient(histogram(needs(scores, bias, moe.sizes.top_k), bias, real.reshape(-1)))


def _range(bias: Float[Array, " experts"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Where the bins begin, and their width."""
    low = jnp.min(bias) - 1
    return low, (jnp.max(bias) + 1 - low) / BINS
