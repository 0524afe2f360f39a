"""A layout: which mesh axis carries which named axis. Specs, shapes and bytes of every array follow from it.

The file format is explained at the top of sharding/layouts/tp8.toml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from kimi_jax.placement import toml_file
from kimi_jax.placement.axes import AXES, ArraySpec
from kimi_jax.placement.groups import GroupSplit
from kimi_jax.placement.validate import Fit, cut_problem, fit, interleave_problems, mapping_problems
from kimi_jax.problems import ProblemsError, nearest

FILE_KEYS = ("description", "mesh", "axes", "cache", "strict")


class LayoutError(ProblemsError):
    """A layout that contradicts itself, does not fit the arrays, or does not fit the devices."""


@dataclass(frozen=True)
class Layout:
    """Declared placement of every array.

    Attributes:
      name: of the file, or any.
      description: one line.
      mesh: mesh axis -> size, in the order of the mesh; the product is the number of devices.
      axes: named axis -> mesh axes, most significant first. A name that is absent is replicated.
      cache: the same for the axes that only caches have (sequence, pages).
      interleave: consecutive positions of a cut sequence that lie on one device before the next device's begin.
      strict: refuse to cut a group of 32 expert units instead of padding it.

    Raises:
      LayoutError: the mapping names an unknown axis, an unknown mesh axis, or an axis that is never cut.
    """

    name: str
    description: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    strict: bool = False
    interleave: int = 1

    def __post_init__(self) -> None:
        axes, cache = _mesh_axes_of(self.axes), _mesh_axes_of(self.cache)
        problems = [*mapping_problems(self.mesh, axes, cache), *interleave_problems(self.interleave)]
        if problems:
            raise LayoutError(f'Layout "{self.name}" contradicts itself', problems)
        object.__setattr__(self, "mesh", MappingProxyType(dict(self.mesh)))
        object.__setattr__(self, "axes", MappingProxyType({k: v for k, v in axes.items() if v}))
        object.__setattr__(self, "cache", MappingProxyType({k: v for k, v in cache.items() if v}))

    def __hash__(self) -> int:
        return hash(
            (self.name, *self.mesh.items(), *self.axes.items(), *self.cache.items(), self.strict, self.interleave)
        )

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be copied or pickled
        mappings = (dict(self.mesh), dict(self.axes), dict(self.cache))
        return Layout, (self.name, self.description, *mappings, self.strict, self.interleave)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes that cut a named axis, most significant first; empty when it is whole.

        Raises:
          LayoutError: there is no such named axis.
        """
        if axis is None:
            return ()
        if axis not in AXES:
            raise LayoutError(f'"{axis}" is no named axis', [nearest(axis, AXES).removeprefix("; ")])
        return self.axes.get(axis) or self.cache.get(axis) or ()

    def parts(self, axis: str | None) -> int:
        """How many pieces a named axis is cut into."""
        return math.prod(self.mesh[mesh_axis] for mesh_axis in self.mesh_axes(axis))

    def held_positions(self, tokens: int) -> int:
        """Positions that a cache needs for `tokens` tokens: whole turns of the devices that share a sequence."""
        parts = self.parts("sequence")
        turn = parts * self.interleave if parts > 1 else 1
        return -(-tokens // turn) * turn

    def spec(self, array: ArraySpec) -> PartitionSpec:
        """The PartitionSpec of an array, one entry per dim."""
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in array.axes))

    def split(self, array: ArraySpec, dim: int) -> GroupSplit | None:
        """How a dim that is padded to whole groups is cut; None for any other dim."""
        axis = array.axes[dim]
        parts = self.parts(axis)
        if axis is None or parts == 1 or AXES[axis].group == 1:
            return None
        split = GroupSplit(array.logical[dim], parts, AXES[axis].group)
        return split if split.cuts_groups else None

    def placed_shape(self, array: ArraySpec) -> tuple[int, ...]:
        """Stored entries per dim of the whole placed array: the shape, with group padding.

        Raises:
          LayoutError: a dim cannot be cut as mapped (`validate` says it for all arrays at once).
        """
        return tuple(self._placed(array, dim) for dim in range(len(array.shape)))

    def local_shape(self, array: ArraySpec) -> tuple[int, ...]:
        """Stored entries per dim on one device. Raises LayoutError like placed_shape."""
        placed = self.placed_shape(array)
        return tuple(entries // self.parts(axis) for entries, axis in zip(placed, array.axes, strict=True))

    def local_bytes(self, array: ArraySpec) -> int:
        """Bytes on one device, padding included."""
        return math.prod(self.local_shape(array)) * array.dtype.itemsize

    def padding_bytes(self, array: ArraySpec) -> int:
        """Bytes that group padding adds to one device, rounded up."""
        shards = math.prod(self.parts(axis) for axis in array.axes)
        return self.local_bytes(array) - array.nbytes // shards

    def _placed(self, array: ArraySpec, dim: int) -> int:
        axis, entries, units = array.axes[dim], array.shape[dim], array.logical[dim]
        parts = self.parts(axis)
        if axis is None or parts == 1:
            return entries
        problem = cut_problem(AXES[axis], entries, units, parts, self.strict)
        if problem:
            raise LayoutError(f'Layout "{self.name}" cannot cut {axis} = {units} into {parts}', [problem])
        split = self.split(array, dim)
        return entries if split is None else entries * split.local_width * parts // units


def load_layout(layout: str | Path | Layout) -> Layout:
    """A shipped layout by name ("tp8"), a layout file by path (*.toml), or a Layout as it is.

    Raises:
      LayoutError: no such file, or all that is wrong in it.
    """
    if isinstance(layout, Layout):
        return layout
    path, read, problems = _read(layout)
    if problems:
        raise LayoutError(f"Layout file {path}", problems)
    return Layout(path.stem, **read)


def load_fitting(layout: str | Path | Layout, arrays: Mapping[str, ArraySpec], what: str = "these arrays") -> Layout:
    """`load_layout` and `validate` in one, so that a faulty file and arrays that it cannot place give one error.

    Raises:
      LayoutError: all that is wrong in the file, then all that its sound part cannot cut, then the sizes that work.
    """
    if isinstance(layout, Layout):
        validate(layout, arrays, what)
        return layout
    path, read, problems = _read(layout)
    if not problems:
        built = Layout(path.stem, **read)
        validate(built, arrays, what)
        return built
    mesh = {name: size for name, size in read["mesh"].items() if type(size) is int and size > 0}
    mapped = {**read["axes"], **read["cache"]}
    known = [name for name in mapped if name in AXES and not AXES[name].never_cut]
    sound = {name: tuple(dict.fromkeys(m for m in mapped[name] if m in mesh)) for name in known}
    found = fit(arrays, mesh, sound, read["strict"])
    raise LayoutError(f'Layout "{path.stem}" does not fit {what}', [*problems, *found.problems], _hint(found))


def validate(layout: Layout, arrays: Mapping[str, ArraySpec], what: str = "these arrays") -> None:
    """Check that a layout fits every array.

    Args:
      layout: the placement.
      arrays: by name.
      what: the name of the model, for the message.

    Raises:
      LayoutError: every problem at once, one line per named axis and reason, then the sizes that would work.
    """
    found = fit(arrays, layout.mesh, {**layout.axes, **layout.cache}, layout.strict)
    if found.problems:
        raise LayoutError(f'Layout "{layout.name}" does not fit {what}', found.problems, _hint(found))


def _hint(found: Fit) -> str:
    """What would work, after the problems."""
    hints = [
        f"Sizes that work for {mesh_axis}: {', '.join(map(str, sizes)) or 'none'}."
        for mesh_axis, sizes in found.sizes.items()
    ]
    if found.blocked:
        hints.append(
            f'Or map {", ".join(found.blocked)} to "" to keep {"it" if len(found.blocked) == 1 else "them"} whole.'
        )
    return " ".join(hints)


def _read(layout: str | Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Path, what the file says in the fields of a Layout (empty where unreadable), and all that is wrong in it."""
    path = toml_file.find("layouts", layout, LayoutError)
    table = toml_file.parse(path, LayoutError)
    problems = toml_file.unknown_keys(table, FILE_KEYS, "the file")
    wrong_text = toml_file.wrong_type(table, "description", str, "")
    wrong_flag = toml_file.wrong_type(table, "strict", bool, "")
    problems += wrong_text + wrong_flag
    tables: dict[str, dict[str, Any]] = {}
    for section in ("mesh", "axes", "cache"):
        wrong = toml_file.wrong_type(table, section, dict, "")
        problems += wrong
        tables[section] = {} if wrong else dict(table.get(section, {}))
    interleave = tables["cache"].pop("interleave", 1)
    for section in ("axes", "cache"):
        for name, value in list(tables[section].items()):
            if not _is_mesh_axes(value):
                problems.append(f"[{section}] {name} must be a mesh axis or a list of them, got {value!r}")
                del tables[section][name]
    axes, cache = _mesh_axes_of(tables["axes"]), _mesh_axes_of(tables["cache"])
    wrong_run = interleave_problems(interleave)
    problems += [*mapping_problems(tables["mesh"], axes, cache), *wrong_run]
    read = {
        "description": "" if wrong_text else table.get("description", ""),
        "mesh": tables["mesh"],
        "axes": axes,
        "cache": cache,
        "strict": False if wrong_flag else table.get("strict", False),
        "interleave": 1 if wrong_run else interleave,
    }
    return path, read, problems


def _is_mesh_axes(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _mesh_axes_of(table: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Mesh axes per name: "tensor", ["tensor", "expert"] and "" become tuples."""
    return {name: tuple(filter(None, [value] if isinstance(value, str) else value)) for name, value in table.items()}
