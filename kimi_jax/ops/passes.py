"""Going over a dimension that is longer than what a kernel's program holds at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

WRITTEN_OUT = 8
"""Passes that may be written one after another, so that the loads of the next need not wait for the sums of the last."""


def over(length: int, block: int, add: Callable[[Any, Any], Any], total: Any, *, written_out: bool = True) -> Any:
    """``total = add(indices, total)`` for blocks of indices that cover ``length``; the last may reach past it.

    Args:
      block: a power of two.
      written_out: False always loops: for products, whose loads the compiler moves ahead by itself.
    """
    passes, offset = pl.cdiv(length, block), jnp.arange(block)
    if written_out and passes <= WRITTEN_OUT:
        for step in range(passes):
            total = add(step * block + offset, total)
        return total
    return jax.lax.fori_loop(0, passes, lambda step, total: add(step * block + offset, total), total)
