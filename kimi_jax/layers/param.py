"""Abstract parameters: a shape, a dtype and named axes, before any memory exists."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from kimi_jax.placement.axes import ArraySpec


def param(
    shape: Sequence[int], dtype: np.dtype[Any], axes: Sequence[str | None], logical: Sequence[int] | None = None
) -> nnx.Param[Any]:
    """A parameter that holds only its description; a loader or a test fills it.

    Args:
      shape: sizes as stored in memory.
      axes: named axis of each dimension, None where a dimension is never cut.
      logical: how many indivisible units each dimension has (heads of a head-major dimension, values of a packed one);
        the shape where omitted.
    """
    return nnx.Param(
        jax.ShapeDtypeStruct(tuple(shape), dtype),
        out_sharding=tuple(axes),
        logical=tuple(logical or shape),
        eager_sharding=False,
    )


def array_spec(variable: nnx.Variable[Any]) -> ArraySpec:
    """What placement needs to know of one abstract parameter."""
    value = variable.get_value()
    return ArraySpec(value.shape, np.dtype(value.dtype), variable.out_sharding, variable.logical)


def declared(module: nnx.Module) -> dict[str, ArraySpec]:
    """Every abstract parameter of a module by dotted path; nothing is allocated."""
    _, state = nnx.split(module)
    return {".".join(map(str, path)): array_spec(variable) for path, variable in nnx.to_flat_state(state)}
