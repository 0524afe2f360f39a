"""Registers, spills and local memory of every kernel, read out of the code objects that the compiler wrote.

A code object is an ELF file; a note of type 32 holds its metadata as msgpack (LLVM, "User Guide for AMDGPU Backend",
code object V3 metadata).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

NOTE_SECTION = 7
METADATA_NOTE = 32
MAGIC = b"\x7fELF"


@dataclass(frozen=True)
class Kernel:
    """What one kernel uses.

    Attributes:
      name: as the compiler calls it.
      target: the chip it was built for.
      vgprs: vector registers of one lane, accumulation registers included in ``agprs``.
      agprs: accumulation registers.
      spills: vector registers that did not fit and live in memory.
      scratch: bytes of private memory of one lane.
      shared: bytes of local memory (LDS) of one workgroup, fixed at compile time.
    """

    name: str
    target: str
    vgprs: int
    agprs: int
    spills: int
    scratch: int
    shared: int


def read_kernels(paths: Iterable[Path]) -> list[Kernel]:
    """Every kernel of these files, by file name."""
    return [kernel for path in sorted(paths) for kernel in kernels_of(path.read_bytes())]


def of_program(built: Sequence[Kernel], earlier: Sequence[Kernel], started: Collection[str]) -> tuple[Kernel, ...]:
    """The kernels of one program, where the compiler builds none twice in a process.

    Args:
      built: built while the program was compiled.
      earlier: built before in this process; they may be of other programs and have the same names.
      started: names of the kernels that the program starts.

    Returns:
      ``built``, and for every other started name the earlier kernel of that name: of several the one that spills most, then
      the one with most registers, since no name says which it is.
    """
    known = {kernel.name for kernel in built}
    worst: dict[str, Kernel] = {}
    for kernel in sorted(earlier, key=lambda kernel: (kernel.spills, kernel.vgprs)):
        if kernel.name in started and kernel.name not in known:
            worst[kernel.name] = kernel
    return (*built, *worst.values())


def kernels_of(code: bytes) -> Iterator[Kernel]:
    """The kernels of one code object.

    Raises:
      ValueError: this is no 64-bit ELF file.
    """
    if code[:5] != MAGIC + b"\x02":
        raise ValueError("not a 64-bit ELF file")
    (sections,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    for index in range(count):
        at = sections + index * size
        (kind,) = struct.unpack_from("<I", code, at + 4)
        start, length = struct.unpack_from("<QQ", code, at + 0x18)
        if kind == NOTE_SECTION:
            for metadata in _notes(code[start : start + length]):
                target = str(metadata["amdhsa.target"])
                yield from (_kernel(entry, target) for entry in metadata["amdhsa.kernels"])


def _notes(section: bytes) -> Iterator[dict[str, Any]]:
    at = 0
    while at + 12 <= len(section):
        name, size, kind = struct.unpack_from("<III", section, at)
        at += 12 + (name + 3 & ~3)
        if kind == METADATA_NOTE:
            yield msgpack.unpackb(section[at : at + size])
        at += size + 3 & ~3


def _kernel(entry: dict[str, Any], target: str) -> Kernel:
    number = lambda key: int(entry.get(key, 0))  # noqa: E731
    return Kernel(
        str(entry[".name"]),
        target,
        number(".vgpr_count"),
        number(".agpr_count"),
        number(".vgpr_spill_count"),
        number(".private_segment_fixed_size"),
        number(".group_segment_fixed_size"),
    )
