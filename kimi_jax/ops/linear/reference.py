"""Projections written for XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops import norm
from kimi_jax.ops.linear.weights import Factor, Gated, Matrix, Scaled
from kimi_jax.ops.product import product
from kimi_jax.ops.situ import api as situ_op
from kimi_jax.quant import fp8


def project(x: Float[Array, "*rows in"], weight: Matrix, dtype: Any) -> Float[Array, "*rows out"]:
    """``x @ weight.T`` accumulated in float32, rounded once; an FP8 weight meets the input rounded to FP8 per row."""
    return (_fp8_product(x, weight) if isinstance(weight, Scaled) else product(x, weight)).astype(dtype)


def _fp8_product(x: Float[Array, "*rows in"], weight: Scaled) -> Float[Array, "*rows out"]:
    """Float32; where several weights read one input, the compiler rounds it once."""
    codes, scales = fp8.quantise(x)
    total = jax.lax.dot_general(
        codes, weight.codes, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return total * scales[..., None] * weight.scale


def project_many(
    x: Float[Array, "*rows in"], factors: Sequence[Factor], dtypes: Sequence[Any]
) -> list[Float[Array, "*rows _"]]:
    """See ``api.project_many``."""
    return [_product(x, factor, dtype) for factor, dtype in zip(factors, dtypes, strict=True)]


def _product(x: Float[Array, "*rows in"], factor: Factor, dtype: Any) -> Float[Array, "*rows out"]:
    if isinstance(factor, Gated):
        gate, up = project(x, factor.gate, dtype), project(x, factor.up, dtype)
        return situ_op.situ(gate, up, factor.beta, factor.linear_beta)
    return project(x, factor, dtype)


def project_normed(
    x: Float[Array, "*rows in"], scale: Float[Array, " in"], eps: float, weight: Matrix
) -> Float[Array, "*rows out"]:
    """See ``api.project_normed``."""
    return project(norm.rms_norm(x, scale, eps), weight, x.dtype)


def project_pair(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    eps: float,
    first: int | Int[Array, ""],
    weight: Matrix,
    y: Float[Array, "*rows in"],
    other: Matrix,
) -> Float[Array, "*rows out"]:
    """See ``api.project_pair``."""
    part = jax.lax.dynamic_slice_in_dim(norm.rms_norm(x, scale, eps), first, weight.shape[1], -1)
    return project(part, weight, x.dtype) + project(y, other, x.dtype)


def project_beside(
    left: Float[Array, "*rows left"], x: Float[Array, "*rows in"], weight: Matrix
) -> Float[Array, "*rows left+out"]:
    """See ``api.project_beside``."""
    return jnp.concatenate([left.astype(x.dtype), project(x, weight, x.dtype)], axis=-1)


def project_and_add(
    joined: Float[Array, "*rows in+out"], scale: Float[Array, " in"], eps: float, weight: Matrix
) -> Float[Array, "*rows out"]:
    """See ``api.project_and_add``."""
    x, y = jnp.split(joined, [weight.shape[1]], axis=-1)
    return project_normed(x, scale, eps, weight) + y
