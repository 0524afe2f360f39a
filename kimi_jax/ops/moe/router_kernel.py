"""The router in one launch: a program per token takes the largest biased score, ``top_k`` times; nothing is sorted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.moe.sent import Asked
from kimi_jax.ops.moe.tiles import options, power_of_two
from kimi_jax.ops.once import once

WARPS = 1
"""So that every maximum stays within a wavefront: 14 scores a lane for 896 experts, and no barrier."""


@once
def route(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"],
    real: Bool[Array, " tokens"] | None,
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    interpret: bool = False,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """See ``router.route``."""
    tokens = logits.shape[0]
    chosen = (tokens, top_k)
    return pl.pallas_call(
        partial(_route, renormalize=renormalize, scale=scale),
        grid=(tokens,),
        out_shape=(jax.ShapeDtypeStruct(chosen, jnp.int32), jax.ShapeDtypeStruct(chosen, jnp.float32)),
        name="moe_route",
        **options(WARPS, 1, interpret),
    )(logits, bias, *(() if real is None else (real,)))


def _route(logits_ref, bias_ref, *refs, renormalize, scale):
    *real_ref, ids_ref, weights_ref = refs
    token, experts, top_k = pl.program_id(0), bias_ref.shape[0], ids_ref.shape[1]
    id_K, score_K = choose(Asked(logits_ref, None), bias_ref, token, top_k, top_k)
    for ref in real_ref:
        id_K = jnp.where(ref[token], id_K, experts)
    store(ids_ref, weights_ref, token, id_K, score_K, renormalize, scale)


def choose(asked: Any, bias_ref: Any, token: Any, top_k: int, passes: Any) -> tuple[Any, Any]:
    """Inside a kernel: the best experts of a token, best first, and their scores; zeros after ``passes`` of them."""
    experts = bias_ref.shape[0]
    expert_E, place_K = jnp.arange(power_of_two(experts)), jnp.arange(power_of_two(top_k))
    real_E = expert_E < experts
    score_E = jax.nn.sigmoid(asked.load_logits(token, expert_E, real_E))
    biased_E = jnp.where(real_E, order(score_E, plt.load(bias_ref.at[expert_E], mask=real_E, other=0)), -jnp.inf)

    def take(place, state):
        left_E, id_K, score_K = state
        best = jnp.min(jnp.where(left_E == jnp.max(left_E), expert_E, expert_E.size))
        score = jnp.sum(jnp.where(expert_E == best, score_E, 0))
        here_K = place_K == place
        return (
            jnp.where(expert_E == best, -jnp.inf, left_E),
            jnp.where(here_K, best, id_K),
            jnp.where(here_K, score, score_K),
        )

    none_K = jnp.zeros(place_K.shape, jnp.int32)
    start = biased_E, none_K, jnp.zeros(place_K.shape, jnp.float32)
    _, id_K, score_K = lax.fori_loop(0, passes, take, start)
    return id_K, score_K


def order(score: Any, bias: Any) -> Any:
    """What experts are chosen by; like ``top_k``, NaN first, whatever a maximum does with NaN."""
    biased = score + bias
    return jnp.where(jnp.isnan(biased), jnp.inf, biased)


def store(ids_ref: Any, weights_ref: Any, token: Any, id_K: Any, score_K: Any, renormalize: bool, scale: float) -> None:
    """Inside a kernel: what ``router.route`` gives for a token whose scores are ``score_K``."""
    place_K = jnp.arange(id_K.shape[0])
    real_K = place_K < ids_ref.shape[1]
    if renormalize:
        score_K = score_K / (jnp.sum(score_K) + 1e-20)
    plt.store(ids_ref.at[token, place_K], id_K, mask=real_K)
    plt.store(weights_ref.at[token, place_K], score_K * scale, mask=real_K)
