"""Normalisation: root mean square in the official order of rounding (text-model section 2.1), and LayerNorm of index keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*rows width"]:
    """``weight * x / sqrt(mean(x^2) + eps)``: normalised in float32, rounded to ``x.dtype``, then weighted in that dtype."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, " width"], bias: Float[Array, " width"], eps: float
) -> Float[Array, "*rows width"]:
    """``weight * (x - mean) / sqrt(variance + eps) + bias`` in float32, with the variance over all entries (not n - 1)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return scaled * weight.astype(jnp.float32) + bias.astype(jnp.float32)
