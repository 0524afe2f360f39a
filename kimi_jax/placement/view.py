"""Where each tensor lies: which device holds which slice, what is padding, what is replicated; as text and as a figure.

Knows abstract arrays and layouts. A device is its place in the mesh, counted as `jax.make_mesh` lays devices out: the
last mesh axis changes fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import Block, Slices, block_at
from kimi_jax.placement.bytes import amount, bytes_of
from kimi_jax.placement.layout import Layout
from kimi_jax.problems import ProblemsError

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b6992d", "#499894", "#d37295", "#79706e")
"""One per slice of a tensor, repeated where there are more slices."""

WHOLE = "#c7ced6"
"""A tensor that every device holds."""

BOX = (0.9, 0.75)
"""Width and height of one outline; devices and arrays are one apart."""


class FigureError(ProblemsError):
    """A figure that cannot be drawn here."""


@dataclass(frozen=True)
class Piece:
    """What one device holds of one array.

    Attributes:
      device: its place in the mesh.
      coordinates: mesh axis -> place along it.
      number: which slice it is, counted over the distinct slices; equal on devices that hold copies.
      block: the stored entries, and the padding around them.
    """

    device: int
    coordinates: Mapping[str, int]
    number: int
    block: Block


@dataclass(frozen=True)
class Row:
    """Arrays that lie alike: their names differ in numbers only.

    Attributes:
      name: with a star where they differ.
      count: how many.
      array: one of them.
      local_shape: stored entries of one device.
      per_device: bytes of all of them on one device, padding included.
      padding: the part of per_device that group padding adds.
      copies: devices that hold the same slice.
    """

    name: str
    count: int
    array: ArraySpec
    local_shape: tuple[int, ...]
    per_device: int
    padding: int
    copies: int


def pieces(layout: Layout, array: ArraySpec) -> tuple[Piece, ...]:
    """What every device of the layout holds of an array, in mesh order.

    Raises:
      LayoutError: the layout cannot cut it.
    """
    local, found = layout.local_shape(array), []
    for device, places in enumerate(itertools.product(*(range(size) for size in layout.mesh.values()))):
        at = dict(zip(layout.mesh, places, strict=True))
        ranks = [_mixed(layout, layout.mesh_axes(axis), at) for axis in array.axes]
        index: Slices = tuple(slice(rank * n, (rank + 1) * n) for rank, n in zip(ranks, local, strict=True))
        number = 0
        for rank, axis in zip(ranks, array.axes, strict=True):
            number = number * layout.parts(axis) + rank
        found.append(Piece(device, at, number, block_at(layout, array, index)))
    return tuple(found)


def copies(layout: Layout, array: ArraySpec) -> int:
    """How many devices hold the same slice of an array: 1 where it is cut over all of them."""
    return layout.devices // math.prod(layout.parts(axis) for axis in array.axes)


def rows(layout: Layout, arrays: Mapping[str, ArraySpec]) -> tuple[Row, ...]:
    """Arrays that lie alike together, in the order in which the first of each appears."""
    groups: dict[tuple[str, ArraySpec], int] = {}
    for name, array in arrays.items():
        key = (re.sub(r"(?<![A-Za-z0-9])\d+", "*", name), array)
        groups[key] = groups.get(key, 0) + 1
    found = []
    for (name, array), count in groups.items():
        size = bytes_of(array, layout)
        local = layout.local_shape(array)
        held = copies(layout, array)
        found.append(Row(name, count, array, local, count * size.per_device, count * size.padding, held))
    return tuple(found)


def table(layout: Layout, arrays: Mapping[str, ArraySpec]) -> str:
    """One line for arrays that lie alike: shape of the whole, of one device's slice, bytes of one device, and copies."""
    heads = ("", "tensor", "", "whole", "one device", "cut by", "bytes on a device", "copies")
    lines: list[tuple[str, ...]] = [heads]
    for row in rows(layout, arrays):
        shapes = (_shape(row.array.shape), _shape(row.local_shape))
        sums = (f"{row.per_device:,}", str(row.copies))
        lines.append((f"{row.count}x", row.name, row.array.dtype.name, *shapes, _cuts(layout, row.array), *sums))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(_aligned, line, widths, _ALIGN)).rstrip() for line in lines)


_ALIGN = ("right", "left", "left", "left", "left", "left", "right", "right")


def _aligned(cell: str, width: int, side: str) -> str:
    return cell.rjust(width) if side == "right" else cell.ljust(width)


def describe(layout: Layout, name: str, array: ArraySpec) -> str:
    """One array in full: its dims, and the slice of every device."""
    return "\n".join(_describe(layout, name, array))


def _describe(layout: Layout, name: str, array: ArraySpec) -> Iterator[str]:
    size, held = bytes_of(array, layout), pieces(layout, array)
    yield f"{name}: {array.dtype.name} {_shape(array.shape)}, {array.nbytes:,} bytes, on {layout.name}"
    for dim, (axis, entries, local) in enumerate(zip(array.axes, array.shape, layout.local_shape(array), strict=True)):
        over = layout.mesh_axes(axis)
        how = f"cut over {' x '.join(over)} into {layout.parts(axis)} of {local:,}" if over else "whole"
        units = array.logical[dim]
        meaning = axis or "no name, never cut"
        yield (
            f"  dim {dim}  {entries:>9,}  {meaning} ({units:,} units): {how}"
            if units != entries
            else (f"  dim {dim}  {entries:>9,}  {meaning}: {how}")
        )
    yield (
        f"  one device: {_shape(held[0].block.shape)}, {size.per_device:,} bytes, {size.padding:,} of them padding; "
        f"each slice lies on {_counted(copies(layout, array), 'device')}"
    )
    cut = [dim for dim, axis in enumerate(array.axes) if layout.parts(axis) > 1]
    for piece in held if cut else ():
        place = ", ".join(f"{axis} {at}" for axis, at in piece.coordinates.items() if layout.mesh[axis] > 1)
        parts = (_part(piece.block, dim) for dim in cut)
        yield f"  device {piece.device} ({place}): {', '.join(parts)}"


def draw(layout: Layout, arrays: Mapping[str, ArraySpec], title: str = "") -> Any:
    """A row per array and a column per device: the outline is the whole array, the filled part what the device holds.

    An array of more than two dims is drawn by two of them: those that are cut, then the largest. Slices that differ have
    different colours, a replicated array is grey, and a slice that is padded on its device is hatched.

    Returns:
      A matplotlib Figure.

    Raises:
      FigureError: matplotlib is not installed.
      LayoutError: the layout cannot cut an array.
    """
    figure = new_figure(3.6 + 0.9 * layout.devices, 0.7 + 0.85 * len(arrays))
    axes = figure.subplots()
    for line, (name, array) in enumerate(arrays.items()):
        _draw_array(axes, layout, name, array, -line)
    for device in range(layout.devices):
        axes.text(device + 0.45, 0.95, str(device), ha="center", va="bottom", fontsize=9)
    axes.text(-0.1, 0.95, "device", ha="right", va="bottom", fontsize=9)
    axes.set_xlim(-3.2, layout.devices + 0.1)
    axes.set_ylim(-len(arrays) + 0.95, 1.25)
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=10)
    return figure


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure of a size in inches, drawn without a display.

    Raises:
      FigureError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FigureError(
            "No figure can be drawn", ["matplotlib is not installed"], 'Install it: pip install "kimi-jax[notebooks]"'
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_array(axes: Any, layout: Layout, name: str, array: ArraySpec, top: float) -> None:
    from matplotlib.patches import Rectangle

    down, across = _shown_dims(layout, array)
    whole = copies(layout, array) == layout.devices
    size = bytes_of(array, layout)
    how = "whole on every device" if whole else _cuts(layout, array)
    axes.text(-0.1, top + 0.62, name, ha="right", va="center", fontsize=8)
    axes.text(-0.1, top + 0.40, f"{array.dtype.name} {_shape(array.shape)}", ha="right", va="center", fontsize=7)
    told = f"{how}; {amount(size.per_device)} each"
    axes.text(-0.1, top + 0.18, told, ha="right", va="center", fontsize=7, color="#444444")
    for piece in pieces(layout, array):
        colour = WHOLE if whole else COLOURS[piece.number % len(COLOURS)]
        (x, wide), (y, high) = (_extent(piece.block, array, dim) for dim in (across, down))
        left, low = piece.device + BOX[0] * x, top + 0.05 + BOX[1] * (1 - y - high)
        size_of = BOX[0] * wide, BOX[1] * high
        axes.add_patch(Rectangle((left, low), *size_of, facecolor=colour, edgecolor="white", linewidth=0))
        if any(_padding(piece.block, dim) for dim in (across, down) if dim is not None):
            axes.add_patch(Rectangle((left, low), *size_of, fill=False, edgecolor="white", hatch="///", linewidth=0))
        axes.add_patch(Rectangle((piece.device, top + 0.05), *BOX, fill=False, edgecolor="#888888", linewidth=0.6))


def _shown_dims(layout: Layout, array: ArraySpec) -> tuple[int | None, int]:
    """The dims that are drawn, downwards and across; None downwards for a vector."""
    order = sorted(range(len(array.shape)), key=lambda dim: (layout.parts(array.axes[dim]) == 1, -array.shape[dim]))
    if len(order) == 1:
        return None, order[0]
    first, second = sorted(order[:2])
    return first, second


def _extent(block: Block, array: ArraySpec, dim: int | None) -> tuple[float, float]:
    """Where a block begins along a dim and how long it is, as parts of the whole."""
    if dim is None:
        return 0.0, 1.0
    held = block.wanted[dim]
    return held.start / array.shape[dim], (held.stop - held.start) / array.shape[dim]


def _padding(block: Block, dim: int) -> int:
    """Stored entries of a dim that hold nothing."""
    return block.shape[dim] - (block.filled[dim].stop - block.filled[dim].start)


def _part(block: Block, dim: int) -> str:
    held, padding = block.wanted[dim], _padding(block, dim)
    return f"dim {dim} [{held.start:,}:{held.stop:,}]" + (f" and {padding:,} of padding" if padding else "")


def _cuts(layout: Layout, array: ArraySpec) -> str:
    """`heads / 8`, joined for several dims; `-` where nothing is cut."""
    found = [f"{axis} / {layout.parts(axis)}" for axis in array.axes if layout.parts(axis) > 1]
    return ", ".join(found) or "-"


def _mixed(layout: Layout, mesh_axes: Sequence[str], at: Mapping[str, int]) -> int:
    """The place of a device among the slices that several mesh axes make, most significant first."""
    rank = 0
    for axis in mesh_axes:
        rank = rank * layout.mesh[axis] + at[axis]
    return rank


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
