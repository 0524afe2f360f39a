"""The routed experts out of the kernels of this folder: choice by the number of tokens, and what kernels demand."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.moe import few, grouped
from kimi_jax.ops.moe.products import Product, product_of
from kimi_jax.ops.moe.weights import ExpertCodes, ExpertMasters, ExpertWeights
from kimi_jax.ops.once import once

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
    interpret: bool = False,
) -> Float[Array, "tokens latent"]:
    """See ``api.experts``.

    Raises:
      ValueError: what kernels cannot read; names all of it.
    """
    if not isinstance(w, ExpertWeights):
        held = "codes" if isinstance(w, ExpertCodes) else "float masters"
        raise ValueError(f'kernels read the checkpoint\'s bytes, not {held}: use experts="packed", or impl "reference"')
    _check_offsets(w)
    first = jnp.asarray(first_expert, jnp.int32).reshape(1)
    run = few.experts if z.shape[0] <= FEW_TOKENS else grouped.experts
    way = product or product_of(z.dtype)
    return run(z, ids, weights, w, first, beta=beta, linear_beta=linear_beta, way=way, interpret=interpret)


def _check_offsets(w: ExpertWeights) -> None:
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
