"""The vision tower's compiled programs: pictures in, rows for the text stream out.

Like the text model's steps, a call runs in one ``jax.shard_map`` over all mesh axes. A layout that maps ``images`` gives every
device its own pack of pictures; one that maps ``vision_heads`` and ``vision_ffn`` cuts the tower; one that maps none has every
device do the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from kimi_jax.config import VisionConfig
from kimi_jax.layers.param import array_spec
from kimi_jax.layers.vision import COLOURS, Vision
from kimi_jax.media.packing import SQUARE, Packed, normalise, pack, plan_calls, stack
from kimi_jax.media.picture import Picture
from kimi_jax.model import bind, dotted
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.compiler import compiler_options, platform_of_mesh
from kimi_jax.placement.layout import Layout, validate
from kimi_jax.precision import FLOAT32, Precision

BLOCK = 1024
"""Patches that meet in attention at a time."""

BUCKETS = (1024, 2048, 4096, 8192, 16_384, 32_768, 67_584)
"""Patches of a pack; the last is the first multiple of ``BLOCK`` that holds the largest picture, of 67,268."""

MOST_ROWS = 512
"""Rows and columns of a grid: the rotary table of the release ends there."""


class TowerCall(NamedTuple):
    """Pictures that run together.

    Attributes:
      numbers: which pictures are in each pack.
      tokens: of each of them.
      packed: their patches.
    """

    numbers: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    packed: Packed


@dataclass(frozen=True)
class VisionSteps:
    """One program per bucket, all for the same number of packs.

    Attributes:
      mesh: an abstract one for programs that are only lowered.
      buckets: sizes of a pack in patches, ascending.
      block: patches that meet in attention at a time; divides every bucket, or holds it.

    Raises:
      LayoutError: the layout cannot cut the tower.
      ValueError: buckets that do not fit ``block``.
    """

    vision: VisionConfig
    layout: Layout
    mesh: Mesh | AbstractMesh
    precision: Precision
    buckets: tuple[int, ...] = BUCKETS
    block: int = BLOCK

    def __post_init__(self) -> None:
        odd = [bucket for bucket in self.buckets if bucket % min(self.block, bucket) or bucket % SQUARE]
        if odd or not self.buckets or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(
                f"buckets {self.buckets} must ascend, in multiples of {SQUARE} and of block = {self.block}"
            )
        validate(self.layout, self.parameters, "the vision tower")

    @cached_property
    def parallel(self) -> Parallel:
        return Parallel.of(self.layout)

    @property
    def packs(self) -> int:
        """Packs of one call."""
        return self.parallel.size("images")

    @cached_property
    def _abstract(self) -> tuple[Any, dict[str, ArraySpec]]:
        graph, state = nnx.split(Vision(self.vision, self.precision, self.parallel))
        return graph, {dotted(path): array_spec(variable) for path, variable in nnx.to_flat_state(state)}

    @property
    def parameters(self) -> dict[str, ArraySpec]:
        """Every parameter before placement."""
        return self._abstract[1]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on one device."""
        return sum(self.layout.local_bytes(spec) for spec in self.parameters.values())

    @cached_property
    def encode(self) -> Callable[[Mapping[str, Any], Packed], Array]:
        """``encode(params, packed)`` -> rows [packs, tokens, text_hidden] in the activation dtype, cut like ``images``."""
        graph, most = self._abstract[0], self.block

        def body(params: Mapping[str, Any], packed: Packed) -> Array:
            block = min(most, packed.row.shape[1])
            vision = cast(Any, bind(graph, params))
            mine = jax.tree.map(lambda array: array[0], packed)
            return vision(mine, block)[None]

        weights = {name: self.layout.spec(spec) for name, spec in self.parameters.items()}
        packs = self.layout.spec(ArraySpec((1,), FLOAT32, ("images",)))
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=(weights, packs), out_specs=packs, check_vma=False)
        return jax.jit(mapped, compiler_options=compiler_options(platform_of_mesh(self.mesh)))

    def describe_call(self, bucket: int) -> Packed:
        """Shapes and dtypes of a call's arrays."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((self.packs, *array.shape), array.dtype), self._empty(bucket)
        )

    def embed(
        self, params: Mapping[str, Any], pictures: Sequence[Picture]
    ) -> list[Float[np.ndarray, "tokens text_hidden"]]:
        """Rows for each picture, on the host, in the order of the pictures.

        Args:
          params: placed as ``parameters`` and the layout say.
          pictures: any number; run together as the buckets allow.

        Raises:
          ValueError: a grid that the tower does not take; names all of them.
        """
        calls = self.packs_of(pictures)
        running = [self.encode(params, call.packed) for call in calls]
        rows: dict[int, np.ndarray] = {}
        for call, out in zip(calls, running, strict=True):
            rows |= _rows_of(call, out)
        return [rows[number] for number in range(len(pictures))]

    def packs_of(self, pictures: Sequence[Picture]) -> list[TowerCall]:
        """The calls that :meth:`embed` makes, ready to run one by one; nothing here touches a device.

        Raises:
          ValueError: a grid that the tower does not take; names all of them.
        """
        problems = [problem for number, picture in enumerate(pictures) if (problem := self._problem(number, picture))]
        if problems:
            raise ValueError("; ".join(problems))
        return [
            TowerCall(
                call.packs,
                tuple(tuple(pictures[number].tokens for number in part) for part in call.packs),
                stack([self._pack([pictures[number] for number in part], call.bucket) for part in call.packs]),
            )
            for call in plan_calls([picture.patches.shape[0] for picture in pictures], self.packs, self.buckets)
        ]

    def run(self, params: Mapping[str, Any], call: TowerCall) -> dict[int, Float[np.ndarray, "tokens text_hidden"]]:
        """Rows of the pictures of one call, by number, on the host."""
        return _rows_of(call, self.encode(params, call.packed))

    def warm(self, params: Mapping[str, Any]) -> None:
        """Compiles the program of every bucket."""
        for bucket in self.buckets:
            jax.block_until_ready(self.encode(params, stack([self._empty(bucket)] * self.packs)))

    def _pack(self, pictures: Sequence[Picture], bucket: int) -> Packed:
        parts = [(picture.grid, normalise(picture.patches)) for picture in pictures]
        return pack(parts, bucket, COLOURS * self.vision.patch**2)

    def _empty(self, bucket: int) -> Packed:
        return self._pack([], bucket)

    def _problem(self, number: int, picture: Picture) -> str:
        frames, rows, columns = picture.grid
        patch = (COLOURS, self.vision.patch, self.vision.patch)
        if picture.patches.shape != (frames * rows * columns, *patch):
            return f"picture {number} of grid {picture.grid} has patches {picture.patches.shape}, not (..., {patch})"
        if not 1 <= frames <= self.vision.position_frames:
            return f"picture {number} has {frames} frames; 1 to {self.vision.position_frames} work"
        if rows % 2 or columns % 2 or not 2 <= min(rows, columns) <= max(rows, columns) <= MOST_ROWS:
            return f"picture {number} has a grid of {rows} x {columns}; even numbers from 2 to {MOST_ROWS} work"
        if frames * rows * columns > self.buckets[-1]:
            return f"picture {number} has {frames * rows * columns:,} patches; {self.buckets[-1]:,} at most work"
        return ""


def _rows_of(call: TowerCall, out: Array) -> dict[int, np.ndarray]:
    rows: dict[int, np.ndarray] = {}
    for numbers, tokens, of_pack in zip(call.numbers, call.tokens, np.asarray(out), strict=True):
        ends = np.cumsum([0, *tokens])
        # copies: a view would keep the whole pack
        rows |= {number: of_pack[ends[i] : ends[i + 1]].copy() for i, number in enumerate(numbers)}
    return rows


def call_bytes(vision: VisionConfig, layout: Layout, patches: int, block: int = BLOCK) -> int:
    """Scratch of one call on one device in bfloat16, within a twentieth of what XLA takes on gfx950 from 4,096 patches on.

    Counted as alive together: q, k and v and the MLP's inner width as float32 products, as float32 results and rounded; the
    residual stream beside its float32 norm; the float32 scores of two blocks.

    Args:
      patches: of the pack's bucket.
      block: patches that meet in attention at a time.
    """
    heads, wide = layout.parts("vision_heads"), layout.parts("vision_ffn")
    inner = 3 * vision.qkv_width // heads + vision.mlp_width // wide
    return patches * (10 * inner + 6 * vision.hidden) + 8 * vision.heads // heads * min(block, patches) ** 2
