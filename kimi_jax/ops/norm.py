"""Root-mean-square normalisation, in the official order of rounding (text-model section 2.1)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*rows width"]:
    """``weight * x / sqrt(mean(x^2) + eps)``: normalised in float32, rounded to ``x.dtype``, then weighted in that dtype."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)
