"""A compiled program as text, read into instructions, and the flow of its arguments followed through loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,<=]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      shape: of its result, as text.
      opcode: such as ``fusion``.
      operands: names of what it reads.
      rest: attributes and metadata, as text.
      inside: the computation that it stands in.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    inside: str

    @property
    def bytes(self) -> int:
        """Bytes of the result, of all its arrays."""
        return shape_bytes(self.shape)

    def attribute(self, key: str) -> str | None:
        """An attribute's text up to the next comma or brace: ``calls``, ``index``, ``body``."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations that a conditional chooses between."""
        found = re.search(r"\bbranch_computations=\{([^}]*)\}", self.rest)
        if found:
            return tuple(name.strip().lstrip("%") for name in found[1].split(","))
        both = (self.attribute("true_computation"), self.attribute("false_computation"))
        return tuple(name for name in both if name)

    @property
    def op_name(self) -> str:
        """What JAX called the operation that it came from; empty where the compiler made it up."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1].replace("\\'", "'") if found else ""


@dataclass(frozen=True)
class Frame:
    """One call on the way to an operation."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      entry: name of the computation that a call starts.
      computations: name -> its instructions, in the order in which they run.
      frames: stack frame -> its location and caller.
      aliases: numbers of the arguments whose memory the results take over.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    frames: Mapping[int, tuple[Frame, int]] = field(default_factory=dict)
    aliases: tuple[int, ...] = ()

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of every computation."""
        for body in self.computations.values():
            yield from body

    def stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The Python calls that wrote an instruction, innermost first; empty where the compiler made it up."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        at, frames = int(found[1]) if found else 0, []
        while at in self.frames:
            frame, at = self.frames[at]
            frames.append(frame)
        return tuple(frames)


def parse(text: str) -> Program:
    """Reads the text of ``compiled.as_text()``.

    Raises:
      ValueError: no computation is marked as the entry.
    """
    entry, name, table = "", "", ""
    aliases: tuple[int, ...] = ()
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {key: {} for key in _TABLES}
    for line in text.splitlines():
        if line.startswith("HloModule "):
            aliases = tuple(map(int, _ALIAS.findall(line.split("entry_computation_layout", 1)[0])))
        elif line in _TABLES:
            table = line
        elif table and (row := re.match(r"^(\d+) (.*)$", line)):
            tables[table][int(row[1])] = row[2]
        elif name and (found := _LINE.match(line)):
            computations[name].append(_instruction(found[2], found[3], name))
        elif head := _HEAD.match(line):
            name, table = head[2], ""
            computations[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
    if not entry:
        raise ValueError("the text has no entry computation: it is no compiled program")
    return Program(entry, {key: tuple(body) for key, body in computations.items()}, _frames(tables), aliases)


def shape_bytes(shape: str) -> int:
    """Bytes of every array in a shape's text."""
    return sum(_bits(dtype) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in _arrays(shape)) // 8


def elements(shape: str) -> list[int]:
    """Bytes of each array in a shape's text, in order."""
    return [_bits(dtype) * math.prod(map(int, filter(None, dims.split(",")))) // 8 for dtype, dims in _arrays(shape)]


def results(instruction: Instruction) -> list[int]:
    """Bytes of each array that an instruction makes; the first half of an asynchronous pair hands its input on too."""
    sizes = elements(instruction.shape)
    # reductions do not
    paired = instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start" and len(sizes) > 1
    return sizes[len(sizes) // 2 :] if paired else sizes


def _arrays(shape: str) -> list[tuple[str, str]]:
    return _ARRAY.findall(shape)


def _bits(dtype: str) -> int:
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 0


def _instruction(name: str, text: str, inside: str) -> Instruction:
    """Splits ``SHAPE OPCODE(OPERANDS), ATTRIBUTES``."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    shape, body = text[:end], text[end:].lstrip()
    start = body.find("(")
    stop = _closing(body, start)
    opcode, inner = body[:start], body[start + 1 : stop]
    operands = tuple(_NAME.findall(inner)) if opcode != "constant" else ()
    rest = body[stop + 1 :]
    return Instruction(name, shape, opcode, operands, f"({inner}){rest}" if opcode == "parameter" else rest, inside)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis opened at ``start`` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Frame, int]]:
    def number(row: str, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", row)
        return int(found[1]) if found else 0

    places = {
        at: Frame(
            tables["FileNames"].get(number(row, "file_name_id"), "").strip('"'),
            tables["FunctionNames"].get(number(row, "function_name_id"), "").strip('"'),
            number(row, "line"),
        )
        for at, row in tables["FileLocations"].items()
    }
    unknown = Frame("", "", 0)
    # the printed caller is one too high: the outermost frame, which has none, names itself
    return {
        at: (places.get(number(row, "file_location_id"), unknown), number(row, "parent_frame_id") - 1)
        for at, row in tables["StackFrames"].items()
    }
