"""A picture made ready for the tower."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import UInt8

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


def tokens_of(grid: Grid) -> int:
    """Places in the prompt: one for two by two patches, all frames of a clip together."""
    return (grid[1] // 2) * (grid[2] // 2)


@dataclass(frozen=True, eq=False)
class Picture:
    """What the prompt, the tower and the caches need to know of one picture.

    Attributes:
      width: original pixels, upright, which is what the prompt says.
      height: the same.
      grid: of its patches.
      patches: row by row, as bytes.
    """

    width: int
    height: int
    grid: Grid
    patches: UInt8[np.ndarray, "patches colours rows columns"] = field(repr=False)

    @property
    def tokens(self) -> int:
        """Places that it takes in the prompt."""
        return tokens_of(self.grid)

    @cached_property
    def digest(self) -> bytes:
        """Stands for what the tower makes of it, 32 bytes: equal for equal patches, whatever file they came in."""
        return hashlib.sha256(repr(self.grid).encode() + self.patches.tobytes()).digest()
