"""The routed experts out of the kernels of this folder: choice by the number of tokens, and what kernels demand."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.moe import few, grouped
from kimi_jax.ops.moe.products import Product, product_of
from kimi_jax.ops.moe.sent import Asked, Sent
from kimi_jax.ops.moe.weights import ExpertCodes, ExpertMasters, ExpertWeights
from kimi_jax.ops.once import once

ROUTED_TOKENS = 8
"""Tokens up to which the first of them also routes: each of its programs looks at the scores of all."""

FLOAT32 = np.dtype(np.float32)

FEW_TOKENS = 64
"""Tokens up to which two launches over the touched experts serve; of 64 an expert of K3 meets 1.1 on average."""


@once
def experts(
    z: Float[Array, "tokens latent"],
    ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    w: ExpertWeights | ExpertCodes | ExpertMasters,
    first_expert: int | Int[Array, ""],
    *,
    beta: float,
    linear_beta: float | None,
    product: Product | None = None,
    dtype: Any = FLOAT32,
    interpret: bool = False,
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``.

    Raises:
      ValueError: what kernels cannot read; names all of it.
    """
    held = _check(w)
    first = jnp.asarray(first_expert, jnp.int32).reshape(1)
    options = {"beta": beta, "linear_beta": linear_beta, "way": product or product_of(z.dtype), "interpret": interpret}
    if z.shape[0] <= FEW_TOKENS:
        return few.experts(z, ids, weights, held, first, dtype=dtype, **options)
    return grouped.experts(z, ids, weights, held, first, **options).astype(dtype)


@once
def routed_experts(
    asked: Asked | Sent,
    bias: Float[Array, " experts"],
    real: Bool[Array, " tokens"],
    w: ExpertWeights | ExpertCodes | ExpertMasters,
    first_expert: int | Int[Array, ""],
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    beta: float,
    linear_beta: float | None,
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "tokens latent"]:
    """See ``api.routed_experts``, for at most ``ROUTED_TOKENS``.

    Raises:
      ValueError: what kernels cannot read; names all of it.
    """
    held = _check(w)
    return few.routed_experts(
        asked,
        bias,
        real,
        held,
        jnp.asarray(first_expert, jnp.int32).reshape(1),
        top_k=top_k,
        renormalize=renormalize,
        scale=scale,
        beta=beta,
        linear_beta=linear_beta,
        way=product_of(asked.dtype),
        dtype=dtype,
        interpret=interpret,
    )


def _check(w: ExpertWeights | ExpertCodes | ExpertMasters) -> ExpertWeights:
    if not isinstance(w, ExpertWeights):
        held = "codes" if isinstance(w, ExpertCodes) else "float masters"
        raise ValueError(f'kernels read the checkpoint\'s bytes, not {held}: use experts="packed", or impl "reference"')
    # the Triton lowering counts bytes but offsets are signed: only one-byte elements fall between
    large = [
        f"{name} {array.shape} has {array.size}"
        for name, array in w._asdict().items()
        if 1 << 31 < array.size <= 1 << 32
    ]
    if large:
        raise ValueError(
            f"kernel offsets overflow for arrays of 2^31 to 2^32 bytes: {'; '.join(large)}. Cut the experts or their "
            "width over more devices"
        )
    return w
