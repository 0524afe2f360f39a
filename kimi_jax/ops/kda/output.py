"""The gated norm of the delta rule's output."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gated_norm(
    out: Float[Array, "*tokens dim"], gate: Float[Array, "*tokens dim"], weight: Float[Array, " dim"], eps: float
) -> Float[Array, "*tokens dim"]:
    """Norm over one head's channels, then the sigmoid gate, all in float32 and rounded once to ``out.dtype``."""
    wide = out.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * weight * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
