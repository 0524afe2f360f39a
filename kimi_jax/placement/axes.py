"""The named axes, and an array before it is placed.

A named axis says what a dim *means* (heads, ffn, expert ...); a layout says which mesh axis cuts it. Nothing else in
the project decides how an array is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True)
class Axis:
    """What a named axis means, and what a cut of it must respect.

    Attributes:
      meaning: one line.
      group: a local share is padded to whole groups of this many units; 1 = never padded.
      never_cut: no layout may map it.
      one_width: it is cut only as a whole: every array that carries it must carry it at the same width.
      owner: the section of a layout file that maps it, "axes" or "cache".
    """

    meaning: str
    group: int = 1
    never_cut: bool = False
    one_width: bool = False
    owner: str = "axes"


AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "embed": Axis("hidden size; whole in every shipped layout"),
        "heads": Axis("head-major rows of KDA and MLA, one unit per head"),
        "q_lora": Axis("query latent of MLA"),
        "kv_lora": Axis("key/value latent of MLA together with the shared key part", one_width=True),
        "decay_rank": Axis("low-rank inner width of the KDA decay (f_a, f_b)"),
        "ffn": Axis("inner width of the dense and shared MLPs"),
        "expert": Axis("routed expert id"),
        "expert_ffn": Axis("inner width of the routed experts", group=32),
        "expert_latent": Axis("contraction side of the routed experts", never_cut=True),
        "latent": Axis("outputs of the latent down projection, inputs of the up projection"),
        "router_expert": Axis("rows of the router weight and its bias"),
        "vocab": Axis("token id: rows of the embedding and of the head"),
        "index_heads": Axis("heads of the sparse-attention indexer"),
        "draft_heads": Axis("attention heads of the drafter"),
        "draft_ffn": Axis("inner width of the drafter's MLPs"),
        "vision_heads": Axis("attention heads of the vision tower"),
        "vision_ffn": Axis("inner width of the vision tower's MLPs"),
        "images": Axis("packs of images in a call of the vision tower"),
        "tokens": Axis("tokens of a long call: each device of it takes a run of every row's"),
        "batch": Axis("rows of a step: one sequence each"),
        "sequence": Axis("position inside a cached sequence", owner="cache"),
        "pages": Axis("page of a paged cache", owner="cache"),
    }
)


@dataclass(frozen=True)
class ArraySpec:
    """An array before it is placed.

    Attributes:
      shape: stored entries per dim.
      dtype: of the stored entries (packed fp4 is uint8).
      axes: the named axis of each dim, None for a dim that is never cut.
      logical: indivisible units per dim: heads for a head-major dim (12288 rows, 96 heads), elements for a packed or
        scale dim (1536 bytes or 96 scales, 3072 elements). Defaults to the shape.

    Raises:
      ValueError: the three tuples differ in length, or units and entries of a dim are no multiple of one another.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    logical: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "logical", tuple(self.logical) or self.shape)
        if not len(self.shape) == len(self.axes) == len(self.logical):
            raise ValueError(f"shape {self.shape}, axes {self.axes} and logical {self.logical} need one entry per dim")
        for entries, units in zip(self.shape, self.logical, strict=True):
            if min(entries, units) < 1 or max(entries, units) % min(entries, units):
                raise ValueError(f"shape {self.shape} and logical {self.logical}: {units} units cannot fill {entries}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, before any padding."""
        return math.prod(self.shape) * self.dtype.itemsize
