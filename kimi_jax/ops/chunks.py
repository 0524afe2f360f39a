"""Queries in chunks, one after the other: what one chunk needs for a while exists once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def by_chunks(run: Callable[[Any], Any], given: Any, empty: Any, most: int) -> Any:
    """``run(given)`` over at most ``most`` tokens at a time.

    Args:
      run: of arrays like ``given``; every result is [rows, tokens, ...] again, each token's independent of the others.
      given: a tree of arrays [rows, tokens, ...].
      empty: the same tree of numbers: what an added token holds where the chunks are not full.
      most: tokens of a row.
    """
    tokens = jax.tree.leaves(given)[0].shape[1]
    count = -(-tokens // most)
    if count <= 1:
        return run(given)
    size = -(-tokens // count)

    def cut(array: Any, value: Any) -> Any:
        padding = [(0, 0), (0, count * size - tokens)] + [(0, 0)] * (array.ndim - 2)
        whole = jnp.pad(array, padding, constant_values=value)
        return whole.reshape(array.shape[0], count, size, *array.shape[2:]).swapaxes(0, 1)

    def join(array: Any) -> Any:
        return array.swapaxes(0, 1).reshape(array.shape[1], count * size, *array.shape[3:])[:, :tokens]

    return jax.tree.map(join, jax.lax.map(run, jax.tree.map(cut, given, empty)))
