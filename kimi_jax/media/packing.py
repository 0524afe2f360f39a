"""Pictures behind one another in arrays of a few fixed sizes, as the tower takes them. Needs no image library."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from kimi_jax.media.picture import Grid, tokens_of

Patches = Float32[np.ndarray, "patches colours rows columns"]

SQUARE = 4
"""Patches that become one token: two rows by two columns, behind one another in a pack."""

_LEVELS = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) * np.float32(2)


class Packed(NamedTuple):
    """Patches of several pictures; whatever belongs to none is padding, with ``end`` 0.

    The four patches of a token lie together, tokens row by row, frame by frame. Arrays of several packs have a dim before these.

    Attributes:
      patches: normalised values of each, float32 [patches, colours * rows * columns].
      row: of the picture's grid, int32 [patches] like all that follow.
      column: the same.
      rows: of the whole grid.
      columns: the same.
      frame: of a clip; 0 in a picture.
      frames: of the whole clip.
      first: where the picture begins in the pack.
      end: one behind its last patch.
      token: row of the result that each square of patches adds to, int32 [patches / 4]; the number of squares in padding.
    """

    patches: Any
    row: Any
    column: Any
    rows: Any
    columns: Any
    frame: Any
    frames: Any
    first: Any
    end: Any
    token: Any


class Call(NamedTuple):
    """Pictures that run together: their numbers in each pack, and the patches that a pack has room for."""

    packs: tuple[tuple[int, ...], ...]
    bucket: int


def normalise(patches: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Bytes as the tower takes them: 0 becomes -1, 255 becomes 1."""
    return _LEVELS[patches]


def plan_calls(counts: Sequence[int], packs: int, buckets: Sequence[int]) -> list[Call]:
    """Which pictures run together: the longest first, each to the pack that has least, in the smallest bucket that is enough.

    Args:
      counts: patches of each picture.
      packs: of a call.
      buckets: sizes of a pack, ascending.

    Raises:
      ValueError: a picture is larger than the largest bucket.
    """
    if counts and max(counts) > buckets[-1]:
        raise ValueError(f"a picture has {max(counts):,} patches, the largest bucket {buckets[-1]:,}")
    calls: list[list[list[int]]] = []
    loads: list[int] = []
    for number in sorted(range(len(counts)), key=lambda number: -counts[number]):
        least = loads.index(min(loads)) if loads else 0
        if not calls or loads[least] + counts[number] > buckets[-1]:
            calls.append([[] for _ in range(packs)])
            loads, least = [0] * packs, 0
        calls[-1][least].append(number)
        loads[least] += counts[number]
    return [_call(call, counts, buckets) for call in calls]


def _call(packs: list[list[int]], counts: Sequence[int], buckets: Sequence[int]) -> Call:
    most = max(sum(counts[number] for number in pack) for pack in packs)
    return Call(tuple(map(tuple, packs)), next(bucket for bucket in buckets if bucket >= most))


def pack(pictures: Sequence[tuple[Grid, Patches]], bucket: int, width: int) -> Packed:
    """One pack.

    Args:
      pictures: grid and normalised patches, row by row, of each, in order; together at most ``bucket`` patches.
      bucket: patches that the pack has room for.
      width: values of one patch.
    """
    parts = []
    start = token = 0
    for grid, patches in pictures:
        parts.append(_part(grid, patches, start, token))
        start += parts[-1].patches.shape[0]
        token += tokens_of(grid)
    parts.append(_padding(bucket, width, start))
    return Packed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def stack(packs: Sequence[Packed]) -> Packed:
    """Packs of one bucket beside one another, in a new first dim of every array."""
    return Packed(*(np.stack(arrays) for arrays in zip(*packs, strict=True)))


def _part(grid: Grid, patches: Patches, start: int, token: int) -> Packed:
    """One picture, beginning at ``start`` of its pack and at row ``token`` of the result."""
    frames, rows, columns = grid
    count = frames * rows * columns
    squares = np.arange(count, dtype=np.int32).reshape(frames, rows // 2, 2, columns // 2, 2)
    order = squares.transpose(0, 1, 3, 2, 4).ravel()
    frame, row, column = np.unravel_index(order, grid)

    def same(value: int) -> np.ndarray:
        return np.full(count, value, np.int32)

    tokens = token + np.tile(np.arange(count // frames // SQUARE, dtype=np.int32), frames)
    return Packed(
        patches.reshape(count, -1)[order],
        row.astype(np.int32),
        column.astype(np.int32),
        same(rows),
        same(columns),
        frame.astype(np.int32),
        same(frames),
        same(start),
        same(start + count),
        tokens,
    )


def _padding(bucket: int, width: int, start: int = 0) -> Packed:
    """What follows the patches of a pack up to its bucket."""
    count = bucket - start
    nothing = np.zeros(count, np.int32)
    one = np.ones(count, np.int32)
    tokens = np.full(count // SQUARE, bucket // SQUARE, np.int32)
    patches = np.zeros((count, width), np.float32)
    return Packed(patches, nothing, nothing, one, one, nothing, one, nothing, nothing, tokens)
