"""Bytes of a set of arrays under a layout: whole, per device, and padding, by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout


@dataclass(frozen=True)
class Bytes:
    """One row of a byte table.

    Attributes:
      arrays: how many arrays were counted.
      whole: their bytes before placement, each counted once.
      per_device: bytes on one device, padding included; every device holds the same.
      padding: the part of per_device that group padding adds.
    """

    arrays: int = 0
    whole: int = 0
    per_device: int = 0
    padding: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.arrays + other.arrays,
            self.whole + other.whole,
            self.per_device + other.per_device,
            self.padding + other.padding,
        )


def bytes_of(array: ArraySpec, layout: Layout) -> Bytes:
    """The row of one array. Raises LayoutError when the layout cannot cut it."""
    return Bytes(1, array.nbytes, layout.local_bytes(array), layout.padding_bytes(array))


def bytes_by_category(
    arrays: Mapping[str, ArraySpec], layout: Layout, category: Callable[[str], str | None]
) -> dict[str, Bytes]:
    """A row per category, in the order in which the categories first appear.

    Args:
      arrays: by name.
      layout: the placement.
      category: the category of a name, or None for an array that is not loaded.

    Returns:
      Category -> its row; `total` adds them up.

    Raises:
      LayoutError: the layout cannot cut an array (`validate` says it for all at once).
    """
    rows: dict[str, Bytes] = defaultdict(Bytes)
    known: dict[ArraySpec, Bytes] = {}  # many tensors share one spec
    for name, array in arrays.items():
        key = category(name)
        if key is None:
            continue
        if array not in known:
            known[array] = bytes_of(array, layout)
        rows[key] += known[array]
    return dict(rows)


def total(rows: Mapping[str, Bytes]) -> Bytes:
    """The sum of the rows of a table."""
    return sum(rows.values(), Bytes())


def amount(size: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least 1: "1.56 TB", "616.6 MB"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.{1 if size >= 10 * unit else 2}f} {name}"
    return f"{size:.0f} bytes"
