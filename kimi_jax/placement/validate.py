"""What can be wrong with a layout: every problem at once, one line per named axis rather than one per tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from kimi_jax.placement.axes import AXES, ArraySpec, Axis
from kimi_jax.placement.groups import divides
from kimi_jax.problems import nearest

Mapped = Mapping[Any, tuple[str, ...]]  # named axis -> mesh axes
Names = dict[Any, list[str]]  # some property of arrays -> the names of those that have it
LARGEST = 64  # sizes above this are not offered


def mapping_problems(mesh: Mapping[str, int], axes: Mapped, cache: Mapped) -> list[str]:
    """What is wrong with a layout before any array is seen."""
    problems = [] if mesh else ["[mesh] is empty: give at least one axis, such as tensor = 1"]
    problems += [
        f"mesh axis {name} = {size!r}: a size is a whole number of devices, at least 1"
        for name, size in mesh.items()
        if type(size) is not int or size < 1
    ]
    for section, mapped in (("axes", axes), ("cache", cache)):
        for name, mesh_axes in mapped.items():
            problems += _name_problems(section, name)
            problems += [
                f'{name} = "{m}": [mesh] has no axis "{m}"{nearest(m, mesh)}' for m in mesh_axes if m not in mesh
            ]
            if len(set(mesh_axes)) < len(mesh_axes):
                problems.append(f"{name} = {list(mesh_axes)} names one mesh axis twice")
            if mesh_axes and name in AXES and AXES[name].never_cut:
                problems.append(f'{name} ({AXES[name].meaning}) is never cut; remove it or map it to ""')
    return problems + _data_problems(mesh, {**axes, **{name: cache[name] for name in cache if name == "sequence"}})


def interleave_problems(run: object) -> list[str]:
    """What is wrong with the number of consecutive positions that a device gets of a cut sequence."""
    if type(run) is int and run >= 1:
        return []
    return [f"[cache] interleave = {run!r}: consecutive positions on one device, a whole number of at least 1"]


_OTHER_DATA = {
    "batch": ("sequences", lambda name: name not in ("pages", "images")),
    "images": ("images", lambda name: name == "embed" or name.startswith("vision_")),
    "tokens": (
        "tokens of a call",
        # cached rows and experts are met by every device's tokens; pictures and drafts are other programs
        lambda name: (
            name not in ("batch", "pages", "images", "sequence", "expert")
            and not name.startswith(("vision_", "draft_"))
        ),
    ),
}
"""Axes along which devices hold other data: of what, and which axes of the same program must lie elsewhere."""


def _data_problems(mesh: Mapping[str, int], axes: Mapped) -> list[str]:
    """Axes that would be summed or gathered over devices that hold other sequences or images."""
    return [
        f'{name} and {data} both lie on mesh axis "{m}": its devices hold different {what}, whose parts would be summed '
        f"together; give {data} a mesh axis of its own"
        for data, (what, together) in _OTHER_DATA.items()
        for name, mesh_axes in axes.items()
        if name != data and together(name)
        for m in mesh_axes
        if m in axes.get(data, ()) and mesh.get(m, 1) != 1
    ]


def cut_problem(axis: Axis, entries: int, units: int, parts: int, strict: bool) -> str | None:
    """Why a dim of `entries` stored entries and `units` indivisible units cannot be cut in `parts`; None if it can."""
    if parts == 1:
        return None
    if units % parts:
        return "does not divide"
    share, per_entry = units // parts, max(1, units // entries)
    if axis.group > 1:
        if not divides(units, parts):
            return f"a share of {share} is odd, which cuts a packed byte"
        if share % axis.group and strict:
            return f"a share of {share} cuts a group of {axis.group}, and the layout is strict"
    elif share % per_entry:
        what = "a packed byte" if per_entry == 2 else f"a group of {per_entry}"
        return f"a share of {share} cuts {what}"
    return None


@dataclass(frozen=True)
class Fit:
    """The problems of one layout with a set of arrays.

    Attributes:
      problems: one line each.
      blocked: named axes that cannot be cut as mapped.
      sizes: sizes that fit every array, per mesh axis that carries a blocked named axis.
    """

    problems: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def fit(arrays: Mapping[str, ArraySpec], mesh: Mapping[str, int], mapped: Mapped, strict: bool) -> Fit:
    """Check every array against a layout.

    Args:
      arrays: by name; equal shapes and axes are checked once.
      mesh: mesh axis -> size.
      mapped: named axis -> mesh axes.
      strict: refuse a cut group instead of padding it.
    """
    kinds: Names = defaultdict(list)
    dims: Names = defaultdict(list)
    for name, array in arrays.items():
        kinds[array.axes, array.shape, array.logical].append(name)
    for (axes, shape, logical), names in kinds.items():
        for axis, entries, units in zip(axes, shape, logical, strict=True):
            if mapped.get(axis) and axis in AXES:
                dims[axis, entries, units].extend(names)
    problems = [*_unknown(kinds), *_cut_twice(kinds, mapped)]
    blocked: dict[str, None] = {}
    for (axis, units, reason), (entries, names) in _uncuttable(dims, mesh, mapped, strict).items():
        works = [parts for parts in range(1, LARGEST + 1) if not cut_problem(AXES[axis], entries, units, parts, strict)]
        problems.append(
            f"{axis} = {units} over {_over(mesh, mapped[axis])} ({_example(names)}): {reason}; "
            f"sizes that work: {', '.join(map(str, works))}"
        )
        blocked[axis] = None
    for axis, widths in _several_widths(dims, mesh, mapped).items():
        found = ", ".join(f"{units} in {_example(names)}" for units, names in widths.items())
        problems.append(
            f"{axis} over {_over(mesh, mapped[axis])} is cut only as a whole, but its width differs: {found}"
        )
        blocked[axis] = None
    carriers = {mesh_axis: None for axis in blocked for mesh_axis in mapped[axis]}
    return Fit(tuple(problems), tuple(blocked), {m: _sizes(m, dims, mesh, mapped, strict) for m in carriers})


def _unknown(kinds: Names) -> list[str]:
    """Axes of arrays that are no named axis."""
    found: Names = defaultdict(list)
    for (axes, _, _), names in kinds.items():
        for axis in set(axes) - {None} - set(AXES):
            found[axis].extend(names)
    return [f'{_example(names)}: "{axis}" is no named axis{nearest(axis, AXES)}' for axis, names in found.items()]


def _cut_twice(kinds: Names, mapped: Mapped) -> list[str]:
    """Mesh axes that would cut two dims of one array."""
    found: Names = defaultdict(list)
    for (axes, _, _), names in kinds.items():
        for first, second in combinations([axis for axis in axes if mapped.get(axis)], 2):
            for mesh_axis in set(mapped[first]) & set(mapped[second]):
                found[mesh_axis, first, second].extend(names)
    return [
        f'{_example(names)}: mesh axis {mesh_axis} would cut both {first} and {second}; map one of them to ""'
        for (mesh_axis, first, second), names in found.items()
    ]


def _uncuttable(
    dims: Names, mesh: Mapping[str, int], mapped: Mapped, strict: bool
) -> dict[tuple, tuple[int, list[str]]]:
    """(axis, units, reason) -> (stored entries of the first such dim, names of all) of the dims that cannot be cut."""
    found: dict[tuple, tuple[int, list[str]]] = {}
    for (axis, entries, units), names in dims.items():
        reason = cut_problem(AXES[axis], entries, units, _parts(mesh, mapped[axis]), strict)
        if reason:
            found.setdefault((axis, units, reason), (entries, []))[1].extend(names)
    return found


def _several_widths(dims: Names, mesh: Mapping[str, int], mapped: Mapped) -> dict[str, dict[int, list[str]]]:
    """The widths and array names of each one-width axis that is cut and carried at several widths."""
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (axis, _, units), names in dims.items():
        if AXES[axis].one_width and _parts(mesh, mapped[axis]) > 1:
            found[axis][units].extend(names)
    return {axis: widths for axis, widths in found.items() if len(widths) > 1}


def _sizes(mesh_axis: str, dims: Names, mesh: Mapping[str, int], mapped: Mapped, strict: bool) -> tuple[int, ...]:
    """Sizes of one mesh axis, the others unchanged, under which every array that it cuts can be cut."""
    carried = {dim: names for dim, names in dims.items() if mesh_axis in mapped[dim[0]]}

    def works(size: int) -> bool:
        resized = {**mesh, mesh_axis: size}
        return not _uncuttable(carried, resized, mapped, strict) and not _several_widths(carried, resized, mapped)

    return tuple(size for size in range(1, LARGEST + 1) if works(size))


def _name_problems(section: str, name: str) -> list[str]:
    owned = [axis for axis, known in AXES.items() if known.owner == section]
    if name not in AXES:
        return [f'[{section}] "{name}" is no named axis{nearest(name, owned)}']
    if AXES[name].owner != section:
        return [f"{name} belongs in [{AXES[name].owner}], not in [{section}]"]
    return []


def _parts(mesh: Mapping[str, int], mesh_axes: tuple[str, ...]) -> int:
    return math.prod(mesh[axis] for axis in mesh_axes)


def _over(mesh: Mapping[str, int], mesh_axes: tuple[str, ...]) -> str:
    product = f" = {_parts(mesh, mesh_axes)}" if len(mesh_axes) > 1 else ""
    sizes = " x ".join(f"{axis} {mesh[axis]}" if product else f"{axis} = {mesh[axis]}" for axis in mesh_axes)
    return sizes + product


def _example(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
