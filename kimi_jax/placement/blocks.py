"""Which stored entries of a checkpoint tensor make one device's block of a placed array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """One device's part of a placed array.

    Attributes:
      wanted: the stored entries of the unplaced array that it holds.
      filled: where they lie in the block; the rest of it is padding.
      shape: of the block.
    """

    wanted: Slices
    filled: Slices
    shape: tuple[int, ...]


def block_at(layout: Layout, array: ArraySpec, index: Slices) -> Block:
    """What lies at `index`, slices of the *placed* array (shape `layout.placed_shape(array)`)."""
    wanted: list[slice] = []
    filled: list[slice] = []
    shape: list[int] = []
    for dim, (part, entries) in enumerate(zip(index, layout.placed_shape(array), strict=True)):
        start, stop, _ = part.indices(entries)
        split = layout.split(array, dim)
        if split is None:
            shape.append(stop - start)
            wanted.append(slice(start, stop))
            filled.append(slice(0, stop - start))
        else:
            per_entry = max(1, array.logical[dim] // array.shape[dim])
            width = split.stored_width(per_entry)
            local, first, length = split.stored_piece(start // width, per_entry)
            shape.append(width)
            wanted.append(slice(first, first + length))
            filled.append(slice(local, local + length))
    return Block(tuple(wanted), tuple(filled), tuple(shape))


def read_block(
    layout: Layout, array: ArraySpec, index: Slices, read: Callable[[Slices], np.ndarray], fill: int
) -> np.ndarray:
    """The local block at `index`, as `jax.make_array_from_callback` asks for it.

    Args:
      layout: the placement.
      array: what is placed.
      index: slices of the *placed* array (shape `layout.placed_shape(array)`), as the callback gives them.
      read: stored entries at slices of the *unplaced* array; called once, with the smallest slices that are needed.
      fill: what a padding entry holds: 0, or groups.PAD_SCALE for scale bytes.

    Returns:
      The block; what `read` returned itself when nothing is padded.
    """
    found = block_at(layout, array, index)
    values = read(found.wanted)
    if values.shape == found.shape:
        return values
    block = np.full(found.shape, fill, values.dtype)
    block[found.filled] = values
    return block
