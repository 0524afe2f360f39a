"""The router: sigmoid scores, a bias that only selects, weights of the selected (text-model section 4)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.implementation import Impl, choose
from kimi_jax.ops.moe import router_kernel


def route(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"],
    top_k: int,
    *,
    renormalize: bool,
    scale: float,
    real: Bool[Array, " tokens"] | None = None,
    impl: Impl = "reference",
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """The experts of each token and their weights.

    Args:
      logits: float32 scores of the full hidden vector.
      bias: float32 ``e_score_correction_bias``; it moves the choice, never the weights.
      top_k: experts of a token.
      renormalize: whether the weights of a token are divided by their sum.
      scale: ``routed_scaling_factor``.
      real: False for padding, which gets the id past the last expert; None where every token is real.
      impl: which implementation runs.

    Returns:
      Ids (int32) by descending biased score, ties to the lower id, and float32 weights in the same order. A row with a
      NaN gets valid ids and NaN weights.

    Raises:
      ValueError: an input is not float32 (a bfloat16 bias merges experts), or ``top_k`` exceeds the experts;
        or ``impl`` is not built.
    """
    problems = [
        f"{name} is {array.dtype.name}, not float32"
        for name, array in (("logits", logits), ("bias", bias))
        if array.dtype != jnp.float32
    ]
    if not 0 < top_k <= logits.shape[-1]:
        problems.append(f"top_k is {top_k} of {logits.shape[-1]} experts")
    if problems:
        raise ValueError("The router cannot choose: " + "; ".join(problems))
    built = {
        "reference": _route,
        "pallas": router_kernel.route,
        "interpret": partial(router_kernel.route, interpret=True),
    }
    run = choose("moe.route", impl, built)
    with jax.named_scope("moe_route"):
        return run(logits, bias, real, top_k=top_k, renormalize=renormalize, scale=scale)


def _route(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"],
    real: Bool[Array, " tokens"] | None,
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """``route`` written for XLA."""
    scores = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(scores + bias, top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    if real is not None:
        ids = jnp.where(real[:, None], ids, logits.shape[-1])
    return ids, weights * scale
