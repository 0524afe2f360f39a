"""SiTU written for XLA, which fuses it with its neighbours."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def situ(
    gate: Float[Array, "*tokens width"], up: Float[Array, "*tokens width"], beta: float, linear_beta: float | None
) -> Float[Array, "*tokens width"]:
    """See ``api.situ``."""
    a, b = gate.astype(jnp.float32), up.astype(jnp.float32)
    gated = beta * jnp.tanh(a / beta) * jax.nn.sigmoid(a)
    linear = b if linear_beta is None else linear_beta * jnp.tanh(b / linear_beta)
    return (gated * linear).astype(gate.dtype)
