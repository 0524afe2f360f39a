"""What an input is multiplied with."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Gated:
    """Two weights whose products meet in SiTU (see ``ops/situ``): the first half of a gated MLP."""

    gate: Float[Array, "out in"]
    up: Float[Array, "out in"]
    beta: float
    linear_beta: float | None


jax.tree_util.register_dataclass(Gated, data_fields=("gate", "up"), meta_fields=("beta", "linear_beta"))

Factor = Float[Array, "out in"] | Gated
"""A weight as the checkpoint stores it, or the two of a gated MLP."""


def arrays(factor: Factor) -> tuple[Float[Array, "out in"], ...]:
    """The weights that a factor is made of; they have one shape."""
    return (factor.gate, factor.up) if isinstance(factor, Gated) else (factor,)
