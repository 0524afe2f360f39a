"""How kernels that address their operands by themselves are started, and the index arithmetic that they share."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

SMALLEST = 16
"""Least size of a side of a matrix product in a kernel."""


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    *operands: Any,
    interpret: bool,
    warps: int = 4,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """One kernel over whole arrays: every program addresses what it needs by itself.

    Operands may be trees; the kernel is called with trees of references.

    Args:
      stages: 2 reads the next tile of a loop while one is worked on; more is not safe with Triton for AMD.
      aliases: operand -> result that is written in its place.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        compiler_params=None if interpret else plt.CompilerParams(num_warps=warps, num_stages=stages),
    )(*operands)


def padded(size: int, least: int = SMALLEST) -> int:
    """The power of two that holds ``size``: kernels know no other sizes."""
    return max(least, pl.next_power_of_2(size))


def limit(size: int, tile: int | None = None) -> int | None:
    """``size`` where tiles of it reach past its end, None where they never do."""
    return None if size % (tile or padded(size)) == 0 else size


def span(start: Any, size: int) -> Any:
    """``size`` indices from ``start`` on."""
    return start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def load(ref: Any, *index: Any, limits: tuple[int | None, ...], where: Any = None, other: float = 0.0) -> Any:
    """The elements at broadcast ``index`` arrays; ``other`` outside of ``limits`` and wherever ``where`` is false.

    Args:
      limits: of each index: its size where a tile may reach past the end, None where it cannot.
    """
    mask = where
    for at, limit in zip(index, limits, strict=True):
        if limit is not None:
            mask = at < limit if mask is None else mask & (at < limit)
    at = ref.at[index]
    return plt.load(at) if mask is None else plt.load(at, mask=mask, other=jnp.asarray(other, ref.dtype))


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Product of two tiles over one axis of each, accumulated in float32; float32 operands are not narrowed."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
