"""What an input is multiplied with."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Scaled:
    """An FP8 weight with a scale per output channel (``quant/fp8``): one object wherever a plain weight may stand.

    Attributes:
      codes: [out, in] e4m3fn.
      scale: [out] float32.
      dtype: what its values are rounded to where they meet operands that are not FP8, as in absorbed attention; a projection
        rounds its input to FP8 instead.
    """

    codes: Float[Array, "out in"]
    scale: Float[Array, " out"]
    dtype: Any = jnp.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return self.codes.ndim


jax.tree_util.register_dataclass(Scaled, data_fields=("codes", "scale"), meta_fields=("dtype",))

Matrix = Float[Array, "out in"] | Scaled
"""A weight as the checkpoint stores it, or re-quantised."""


@dataclass(frozen=True)
class Gated:
    """Two weights whose products meet in SiTU (see ``ops/situ``): the first half of a gated MLP."""

    gate: Matrix
    up: Matrix
    beta: float
    linear_beta: float | None


jax.tree_util.register_dataclass(Gated, data_fields=("gate", "up"), meta_fields=("beta", "linear_beta"))

Factor = Matrix | Gated
"""A weight, or the two of a gated MLP."""


def matrices(factor: Factor) -> tuple[Matrix, ...]:
    """The weights that a factor is made of; they have one shape."""
    return (factor.gate, factor.up) if isinstance(factor, Gated) else (factor,)


def widened(matrix: Matrix) -> Float[Array, "out in"]:
    """The weight itself, in ``matrix.dtype``: for XLA on a CPU, as it writes the whole of it out."""
    if isinstance(matrix, Scaled):
        return (matrix.codes.astype(jnp.float32) * matrix.scale[:, None]).astype(matrix.dtype)
    return matrix
