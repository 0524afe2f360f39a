"""Projections stored as the checkpoint stores them: ``[out, in]``, no bias."""

from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.layers.param import param
from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.precision import Precision


class Linear(nnx.Module):
    """A projection with named axes.

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

    def __call__(
        self, x: Float[Array, "*rows in"], dtype: Any = None, impl: Impl = "reference"
    ) -> Float[Array, "*rows out"]:
        """In ``dtype``, that of ``x`` where omitted; inputs of several projections go to ``ops/linear`` together."""
        (out,) = linear_op.project_many(x, [self.weight[...]], [dtype or x.dtype], impl)
        return out
