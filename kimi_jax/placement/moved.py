"""Bytes that a compiled step reads and writes, so that a weight read twice or a result written for nothing shows.

Every scheduled instruction reads what it is given and writes its result: the body of a loop once, all branches of a
choice. Of what it only picks rows from, or updates in place, it touches those rows: the compiler's own slices say how
many, for a kernel the caller must. What a kernel reads more often than once, and what caches save, is not in the
program's text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kimi_jax.placement.flow import PASSING, UPDATES, called, parameter_number, reads, updated_in_place
from kimi_jax.placement.hlo import Instruction, Program, results

SLICES = ("dynamic-slice", "gather", "slice")
FREE = ("parameter", "constant", "iota", "partition-id", "replica-id", "after-all")
"""Opcodes that start nothing and hold next to nothing."""


@dataclass(frozen=True)
class Touch:
    """How much of an argument a kernel touches.

    Attributes:
      read: share of it that is read.
      updated: bytes written by a kernel that updates it in place and reads none of it; None where it is read, and written
        again, whole.
    """

    read: float = 1.0
    updated: float | None = None


@dataclass(frozen=True)
class Expected:
    """What a step must move.

    Attributes:
      bytes: read and written on one device, by the roofline.
      touch: how much of each argument, by name.
    """

    bytes: float
    touch: Callable[[str], Touch]


@dataclass(frozen=True)
class Again:
    """An argument that several instructions read: bytes of all but the first time."""

    argument: str
    bytes: float
    instructions: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """What the instructions of one step read and write on one device.

    Attributes:
      arguments: bytes read of parameters and caches, and written to caches.
      temps: bytes of everything else, written and read.
      parts: part of the step -> bytes, most first.
      again: arguments that are read more than once, most bytes first.
      least: bytes that must move, by the roofline.
      loops: inside the step; the body of each counts once, so with any of them all bytes are at least so many.
    """

    arguments: float
    temps: float
    parts: tuple[tuple[str, float], ...]
    again: tuple[Again, ...]
    least: float
    loops: int = 0

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.arguments + self.temps

    @property
    def ratio(self) -> float:
        """Over what must move."""
        return self.bytes / self.least


def moved(program: Program, expected: Expected, part_of: Callable[[Instruction], str], depth: int) -> Moved:
    """Adds up one step.

    Args:
      expected: what it must move.
      part_of: the part of the step that an instruction belongs to.
      depth: loops around a step: 1 where the outermost loop runs one step after another.
    """
    arguments = {(read.instruction.name, read.operand): read.argument.name for read in reads(program, 1)}
    of_arguments, of_temps = 0.0, 0.0
    parts: dict[str, float] = defaultdict(float)
    readers: dict[str, list[tuple[str, float]]] = defaultdict(list)
    loops = 0
    for computation in _computations(program, program.entry, depth):
        body = program.computations[computation]
        loops += sum(instruction.opcode == "while" for instruction in body)
        sizes = {instruction.name: instruction.bytes for instruction in body}
        for instruction in body:
            if instruction.opcode in (*PASSING, *FREE, "conditional") or instruction.opcode.endswith("-done"):
                continue
            for argument, size, is_read in _touched(program, instruction, sizes, arguments, expected.touch):
                parts[part_of(instruction)] += size
                if argument is None:
                    of_temps += size
                    continue
                of_arguments += size
                if is_read:
                    readers[argument].append((instruction.name, size))
    again = [
        Again(name, sum(size for _, size in times[1:]), tuple(reader for reader, _ in times))
        for name, times in readers.items()
        if len(times) > 1
    ]
    return Moved(
        of_arguments,
        of_temps,
        tuple(sorted(parts.items(), key=lambda part: -part[1])),
        tuple(sorted(again, key=lambda each: -each.bytes)),
        expected.bytes,
        loops,
    )


def _computations(program: Program, computation: str, depth: int) -> Iterator[str]:
    """Those of the loops that lie ``depth`` deep or deeper, and of what either of them chooses between."""
    if depth <= 0:
        yield computation
    for instruction in program.computations[computation]:
        if instruction.opcode == "while":
            for key in ("condition", "body"):
                yield from _computations(program, instruction.attribute(key) or "", depth - 1)
        elif instruction.opcode == "conditional":
            for branch in instruction.branches:
                yield from _computations(program, branch, depth)


def _touched(
    program: Program,
    instruction: Instruction,
    sizes: Mapping[str, int],
    arguments: Mapping[tuple[str, str], str],
    touch: Callable[[str], Touch],
) -> Iterator[tuple[str | None, float, bool]]:
    """(argument, or None for a temporary; bytes; whether they are read) of each array that an instruction meets."""
    updated = updated_in_place(program, instruction)
    rewritten = {operand: sizes[operand] for operand in updated.values()}
    for operand in dict.fromkeys(instruction.operands):
        argument = arguments.get((instruction.name, operand))
        held = Touch() if argument is None else touch(argument)
        rows = picked_bytes(program, instruction, instruction.operands.index(operand))
        if rows is None and operand in rewritten and held.updated is not None:
            rows = held.updated
        if rows is not None and operand in rewritten:
            rewritten[operand] = 0
            yield argument, rows, False
        else:
            yield argument, sizes[operand] * held.read if rows is None else rows, True
    for operand, size in rewritten.items():
        yield arguments.get((instruction.name, operand)), size, False
    yield None, sum(size for at, size in enumerate(results(instruction)) if at not in updated), False


def picked_bytes(program: Program, instruction: Instruction, at: int) -> float | None:
    """Bytes that are picked out of an operand, or written into it; None where it is read whole."""
    if at == 0 and instruction.opcode in SLICES:
        return instruction.bytes
    if at == 0 and instruction.opcode in UPDATES:
        written = instruction.operands[UPDATES[instruction.opcode]]
        return next(each.bytes for each in program.computations[instruction.inside] if each.name == written)
    body = called(program, instruction)
    if not body:
        return None
    whole = {each.name for each in body if each.opcode == "parameter" and parameter_number(each) == at}
    total = 0.0
    for each in body:
        for place in (place for place, name in enumerate(each.operands) if name in whole):
            if each.opcode == "bitcast":
                whole.add(each.name)
                continue
            rows = picked_bytes(program, each, place)
            if rows is None:
                return None
            total += rows
    return total
