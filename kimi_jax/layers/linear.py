"""Projections stored as the checkpoint stores them: ``[out, in]``, no bias."""

from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.layers.param import array_spec, param
from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.linear.weights import Matrix, Scaled
from kimi_jax.precision import FLOAT32, Precision
from kimi_jax.quant.fp8 import E4M3


class Linear(nnx.Module):
    """A projection with named axes; its weight is as the checkpoint stores it, or FP8 with a scale per output channel.

    Args:
      logical: units of the two dimensions where they are not single rows and columns (see ``param``).
    """

    def __init__(
        self,
        out: int,
        inner: int,
        axes: tuple[str | None, str | None],
        precision: Precision,
        logical: tuple[int, int] | None = None,
    ) -> None:
        self.weight = param((out, inner), np.dtype(precision.projection), axes, logical)
        self.operand = np.dtype(precision.operand)

    def hold_in_fp8(self) -> None:
        """``weight`` [out, in] becomes e4m3fn, cut as before; beside it ``weight_scale`` [out] float32, cut as the outputs are."""
        spec = array_spec(self.weight)
        self.weight = param(spec.shape, E4M3, spec.axes, spec.logical)
        self.weight_scale = param(spec.shape[:1], FLOAT32, spec.axes[:1], spec.logical[:1])

    @property
    def factor(self) -> Matrix:
        """What ops multiply with."""
        if hasattr(self, "weight_scale"):
            return Scaled(self.weight[...], self.weight_scale[...], self.operand)
        return self.weight[...]

    def __call__(
        self, x: Float[Array, "*rows in"], dtype: Any = None, impl: Impl = "reference"
    ) -> Float[Array, "*rows out"]:
        """In ``dtype``, that of ``x`` where omitted; inputs of several projections go to ``ops/linear`` together."""
        (out,) = linear_op.project_many(x, [self.factor], [dtype or x.dtype], impl)
        return out
