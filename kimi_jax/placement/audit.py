"""What a compiled step costs, from the compiler's output: memory, collectives, copies, launches, readers of weights, bytes.

Counts are per step: the body of a loop counts once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kimi_jax.placement.flow import Argument, Read, arguments, reads
from kimi_jax.placement.hlo import Frame, Instruction, Program, results
from kimi_jax.placement.moved import Expected, Moved, moved, picked_bytes

MIB = 1 << 20
LARGE = 1_000_000
"""Bytes of an argument from which every instruction that reads it is classified."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
COPIES = ("copy", "copy-start")

Label = Callable[[tuple[Frame, ...]], str]
"""Names the part of a step that Python calls, innermost first, belong to; "" for none."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler counts them."""

    arguments: int
    outputs: int
    aliased: int
    temp: int


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
      kind: such as ``all-reduce``.
      bytes: of the result on one device.
      participants: devices of one group.
      part: of the step.
    """

    kind: str
    bytes: int
    participants: int
    part: str


@dataclass(frozen=True)
class Copy:
    """A plain copy of an array."""

    bytes: int
    part: str
    instruction: str
    op_name: str


@dataclass(frozen=True)
class Reader:
    """An instruction other than a product, a kernel or a slice that reads a large argument.

    Attributes:
      argument: what it reads.
      bytes: of the argument on one device.
      writes: bytes of its result; as many as the argument means that the argument is rewritten at every step.
    """

    argument: str
    bytes: int
    writes: int
    part: str
    instruction: str
    opcode: str
    op_name: str


@dataclass(frozen=True)
class Started:
    """One kernel as a step starts it.

    Attributes:
      name: of the kernel, as in its code object.
      count: launches of a step, inner loops included, each body once.
      grid: workgroups.
      threads: of a workgroup.
      shared: bytes of local memory (LDS) of a workgroup.
    """

    name: str
    count: int
    grid: tuple[int, ...]
    threads: int
    shared: int


@dataclass(frozen=True)
class Launches:
    """Kernels, copies and collectives that are started.

    Attributes:
      step: in one step, outside inner loops.
      inner: in loops inside a step, each body counted once.
      outside: once per call.
      kinds: kind of a step's launches -> how many, inner ones included.
      parts: part of a step -> launches by the scheduled instructions, inner ones and those outside included.
      kernels: those that a step starts, most often started first.
    """

    step: int
    inner: int
    outside: int
    kinds: tuple[tuple[str, int], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    kernels: tuple[Started, ...] = ()


@dataclass(frozen=True)
class Audit:
    """All that was found in one compiled program."""

    memory: Memory
    arguments: tuple[Argument, ...]
    aliased: tuple[str, ...]
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]
    readers: tuple[Reader, ...]
    launches: Launches | None
    moved: Moved | None = None

    def counted(self) -> dict[tuple[str, str], int]:
        """(part of the step, kind of collective) -> how many."""
        return dict(Counter((found.part, found.kind) for found in self.collectives))


def audit(
    program: Program,
    memory: Any,
    label: Label,
    thunks: str | None = None,
    expected: Expected | None = None,
    *,
    loops_over_steps: bool,
) -> Audit:
    """Reads one compiled program.

    Args:
      program: of ``compiled.as_text()``.
      memory: of ``compiled.memory_analysis()``.
      label: names the parts of a step.
      thunks: the compiler's dump ``*thunk_sequence_after_thunk_passes.txt``; without it launches are not counted.
      expected: what a step must move; without it the bytes that it does are not counted.
      loops_over_steps: whether the outermost loop runs one step after another; otherwise the whole program is one.
    """
    depth = 1 if loops_over_steps else 0
    named = Parts(program, label)
    kept = arguments(program)
    copies = [i for i in program.instructions if i.opcode in COPIES and i.bytes > MIB]
    weights = [read for read in reads(program, LARGE) if read.argument.number not in program.aliases]
    found = [read for read in weights if not _expected(program, read)]
    return Audit(
        Memory(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        ),
        kept,
        tuple(argument.name for argument in kept if argument.number in program.aliases),
        tuple(_collective(i, named) for i in program.instructions if _collective_kind(i)),
        tuple(Copy(i.bytes, named.of(i), i.name, i.op_name) for i in copies),
        tuple(_reader(read, named) for read in found),
        None if thunks is None else launches(thunks, named, depth),
        None if expected is None else moved(program, expected, named.of, depth),
    )


class Parts:
    """The part of the step that each instruction belongs to.

    What the compiler made up has no Python calls: it belongs where what it reads, or what it calls, comes from.
    """

    def __init__(self, program: Program, label: Label) -> None:
        self.program, self.label = program, label
        self._known: dict[str, str] = {}
        self._by_name = {i.name: i for i in program.instructions}

    def of(self, instruction: Instruction) -> str:
        """The part's name; "loop" for what belongs to none."""
        return self._find(instruction, 8) or "loop"

    def named(self, name: str) -> str | None:
        """The part of an instruction by name; None where there is no such instruction."""
        return self.of(self._by_name[name]) if name in self._by_name else None

    @property
    def instructions(self) -> Iterable[Instruction]:
        return self._by_name.values()

    def _find(self, instruction: Instruction, depth: int) -> str:
        if instruction.name not in self._known:
            known = self.label(self.program.stack(instruction))
            if not known and depth:
                known = next(filter(None, (self._find(i, depth - 1) for i in self._near(instruction))), "")
            self._known[instruction.name] = known
        return self._known[instruction.name]

    def _near(self, instruction: Instruction) -> Iterable[Instruction]:
        called = instruction.attribute("calls")
        yield from self.program.computations.get(called or "", ())
        yield from (self._by_name[name] for name in instruction.operands if name in self._by_name)


def _collective_kind(instruction: Instruction) -> str | None:
    """The kind; the second half of an asynchronous pair does not count."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _collective(instruction: Instruction, named: Parts) -> Collective:
    kind = _collective_kind(instruction) or ""
    return Collective(kind, sum(results(instruction)), _participants(instruction), named.of(instruction))


def _participants(instruction: Instruction) -> int:
    """Devices of one group; 0 where none are named.

    Three forms: listed ``{{0,1},{2,3}}``, counted ``[2,2]<=[4]``, by axes of a mesh ``mesh['a'=2,'b'=2] {'b'}``.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.rest):
        return len(listed[1].split(","))
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", meshed[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", meshed[2]))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", instruction.rest)
    return int(counted[1]) if counted else 0


def _expected(program: Program, read: Read) -> bool:
    """Whether reading the argument there is the work itself: a product, a kernel, a slice, an update in place."""
    instruction = read.instruction
    if instruction.opcode in ("dot", "custom-call"):
        return True
    body = program.computations.get(instruction.attribute("calls") or "", ())
    opcodes = {inner.opcode for inner in body}
    if opcodes & {"dot", "custom-call"}:
        return True
    if "reduce" in opcodes and instruction.bytes < read.argument.bytes // 4:
        return True  # a product with one row is written as multiplications and a sum
    return picked_bytes(program, instruction, instruction.operands.index(read.operand)) is not None


def _reader(read: Read, named: Parts) -> Reader:
    found, argument = read.instruction, read.argument
    part = named.of(found)
    return Reader(argument.name, argument.bytes, found.bytes, part, found.name, found.opcode, found.op_name)


_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s+\[[^\]]*\]\s*(.*)$")
_KERNEL = re.compile(r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes")
_HOLDERS = (
    "kAsyncStart",
    "kAsyncDone",
    "kCommandBuffer",
    "kSequential",
    "kWhile",
    "kConditional",
    "kPartitionId",
    "kReplicaId",
)
_LAUNCHING = ("fusion", "copy", "sort", "custom-call", "dynamic-slice", "dynamic-update-slice", "dot", "reduce")


def launches(thunks: str, named: Parts, depth: int) -> Launches:
    """Counts the thunk sequence of a program whose step lies ``depth`` loops deep."""
    loops: list[int] = []  # indentation of the loops around a line
    counts, kinds, kernels = Counter[int](), Counter[str](), Counter[tuple[str, tuple[int, ...], int, int]]()
    for line in thunks.splitlines():
        found = _THUNK.match(line)
        if not found:
            continue
        indent, kind = len(found[1]), found[2]
        while loops and indent <= loops[-1]:
            loops.pop()
        if kind == "kWhile":
            loops.append(indent)
        elif kind not in _HOLDERS:
            counts[len(loops)] += 1
            if len(loops) >= depth:
                kinds[kind] += 1
                kernels.update(_kernel(found[3]))
    parts = Counter(named.of(i) for i in _scheduled(named))
    outside, step = sum(counts[at] for at in range(depth)), counts[depth]
    return Launches(
        step,
        counts.total() - step - outside,
        outside,
        tuple(sorted(kinds.items())),
        tuple(parts.most_common()),
        tuple(Started(key[0], count, *key[1:]) for key, count in kernels.most_common()),
    )


def _kernel(line: str) -> Iterable[tuple[str, tuple[int, ...], int, int]]:
    """Name, grid, threads and local memory of the kernel that a line of the sequence starts, if it does."""
    if found := _KERNEL.search(line):
        grid, threads = (tuple(map(int, sizes.split(","))) for sizes in (found[2], found[3]))
        yield found[1], grid, math.prod(threads), int(found[4])


def _scheduled(named: Parts) -> Iterable[Instruction]:
    """Instructions that start a kernel, a copy or a collective: those of the entry and of loops, not inside a fusion."""
    program = named.program
    called = {i.attribute(key) for i in program.instructions for key in ("calls", "to_apply")}
    for name, body in program.computations.items():
        if name not in called:
            yield from (i for i in body if i.opcode in _LAUNCHING or _collective_kind(i))
