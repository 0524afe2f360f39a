"""Routed experts of the latent mixture: choice (``route``) and weighted sum (``experts``); text-model section 4."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.implementation import Impl, choose
from kimi_jax.ops.moe import kernels, masters, reference
from kimi_jax.ops.moe.products import Product
from kimi_jax.ops.moe.router import route as route
from kimi_jax.ops.moe.sent import Asked as Asked
from kimi_jax.ops.moe.sent import Sent as Sent
from kimi_jax.ops.moe.weights import ExpertCodes as ExpertCodes
from kimi_jax.ops.moe.weights import ExpertMasters as ExpertMasters
from kimi_jax.ops.moe.weights import ExpertWeights as ExpertWeights
from kimi_jax.ops.moe.weights import check
from kimi_jax.ops.moe.weights import unpack as unpack


def experts(
    z: Float[Array, "tokens latent"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertWeights | ExpertCodes | ExpertMasters,
    *,
    beta: float,
    linear_beta: float | None,
    first_expert: int | Int[Array, ""] = 0,
    product: Product | None = None,
    dtype: Any = jnp.float32,
    impl: Impl = "reference",
) -> Float[Array, "tokens latent"]:
    """``sum_i weights_i * w2_i situ(w1_i z, w3_i z)`` over the experts of each token that are held here.

    Args:
      z: latent rows, float32 or bfloat16; products are summed in float32, and the activation and each expert's output
        are rounded to this dtype.
      ids: expert ids over the whole model, distinct within a row. Ids outside ``[first_expert, first_expert + local)``
        are another device's, or padding, and are skipped; a row with none may hold anything, also NaN.
      weights: float32 weights in the order of ``ids``.
      w: the experts held here, as stored or as unpacked codes: results are the same up to the order of sums. Or float masters,
        which are multiplied as they are and have gradients, in the reference only.
      beta: bound of the gated half of SiTU.
      linear_beta: bound of its linear half, or None.
      first_expert: id of the first expert in ``w``; may be traced.
      dtype: of the result, which is summed in float32 and rounded once.
      product: how kernels multiply with the weights; None keeps what rows of ``z``'s dtype hold.
      impl: which implementation runs; kernels read experts as stored only.

    Returns:
      The weighted sum; before any reduction over devices, and before the norm.

    Raises:
      ValueError: shapes of ``w`` do not belong together or to ``z``; names all of them. ``impl`` is not built, or cannot
        read ``w`` or multiply as asked.
    """
    check(w, z.shape[-1])
    plain = masters.experts if isinstance(w, ExpertMasters) else reference.experts
    built = {
        "reference": plain,
        "pallas": partial(kernels.experts, product=product),
        "interpret": partial(kernels.experts, product=product, interpret=True),
    }
    run = choose("moe.experts", impl, built)
    if product and impl == "reference":
        raise ValueError(f"moe.experts: the reference multiplies in one way only; product {product!r} is for kernels")
    with jax.named_scope("moe_experts"):
        options = {"beta": beta, "linear_beta": linear_beta, "first_expert": first_expert}
        if impl != "reference":
            options["dtype"] = np.dtype(dtype)
        return run(z, ids, weights, w, **options).astype(dtype)


def routes_itself(tokens: int, impl: Impl) -> bool:
    """Whether :func:`routed_experts` routes in a launch that it needs anyway."""
    return impl != "reference" and tokens <= kernels.ROUTED_TOKENS


def routed_experts(
    asked: Asked | Sent,
    bias: Float[Array, " experts"],
    real: Bool[Array, " tokens"],
    w: ExpertWeights | ExpertCodes | ExpertMasters,
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    beta: float,
    linear_beta: float | None,
    first_expert: int | Int[Array, ""] = 0,
    dtype: Any = jnp.float32,
    impl: Impl = "reference",
) -> Float[Array, "tokens latent"]:
    """:func:`experts` of what :func:`route` chooses; kernels do it in two launches where :func:`routes_itself`.

    Args:
      asked: logits and latents.
      bias, real, top_k, renormalize, scale: as for :func:`route`.
      w, beta, linear_beta, first_expert, dtype, impl: as for :func:`experts`.
    """
    shared = {"beta": beta, "linear_beta": linear_beta, "first_expert": first_expert}
    routing = {"renormalize": renormalize, "scale": scale}
    if not routes_itself(asked.sizes[0], impl):
        logits, latent = asked.whole()
        ids, weights = route(logits, bias, top_k, real=real, impl=impl, **routing)
        return experts(latent, ids, weights, w, dtype=dtype, impl=impl, **shared)
    check(w, asked.sizes[2])
    built = {"pallas": kernels.routed_experts, "interpret": partial(kernels.routed_experts, interpret=True)}
    run = choose("moe.routed_experts", impl, built)
    with jax.named_scope("moe_experts"):
        return run(asked, bias, real, w, top_k=top_k, dtype=np.dtype(dtype), **routing, **shared)
