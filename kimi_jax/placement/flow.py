"""Which instructions of a compiled program read its arguments: followed through loops, tuples, bitcasts and updates in place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_jax.placement.hlo import Instruction, Program, elements

PASSING = ("bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier", "copy-start", "copy-done")
"""Opcodes whose result is, or stands for, what they were given."""

UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode that writes rows into its first operand -> the operand that holds them."""

_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclass(frozen=True)
class Argument:
    """One array that the program is called with.

    Attributes:
      number: its place among the arguments that the compiled program kept.
      name: what JAX calls it, such as ``params['lm_head.weight']``.
      bytes: on one device.
    """

    number: int
    name: str
    bytes: int


@dataclass(frozen=True)
class Read:
    """An instruction that reads an argument where it lies; ``operand`` is what the argument is called there."""

    argument: Argument
    instruction: Instruction
    operand: str


Held = dict[int, Argument]
"""Element of a tuple (0 for an array) -> the argument that it is."""


def arguments(program: Program) -> tuple[Argument, ...]:
    """The arguments that the compiled program kept: JAX drops those that nothing reads."""
    found = []
    for instruction in program.computations[program.entry]:
        if instruction.opcode == "parameter":
            found.append(Argument(parameter_number(instruction), instruction.op_name, instruction.bytes))
    return tuple(sorted(found, key=lambda argument: argument.number))


def parameter_number(parameter: Instruction) -> int:
    """The place of a parameter among those of its computation."""
    return int(parameter.rest[1 : parameter.rest.index(")")])


def reads(program: Program, least: int) -> list[Read]:
    """Every instruction that reads an argument of at least ``least`` bytes, loops included, bitcasts and tuples not."""
    large = {argument.number: argument for argument in arguments(program) if argument.bytes >= least}
    found: list[Read] = []
    _follow(program, program.entry, large, None, found)
    return found


def _follow(
    program: Program, computation: str, of_entry: Mapping[int, Argument], carried: Held | None, found: list[Read]
) -> None:
    """Walks one computation; ``carried`` is what its single tuple parameter holds, None in the entry."""
    held: dict[str, Held] = defaultdict(dict)
    for instruction in program.computations[computation]:
        name = instruction.name
        if instruction.opcode == "parameter":
            at = parameter_number(instruction)
            held[name] = dict(carried) if carried is not None else {0: of_entry[at]} if at in of_entry else {}
        elif instruction.opcode == "get-tuple-element":
            element = int(instruction.attribute("index") or 0)
            whole = held.get(instruction.operands[0], {})
            held[name] = {0: whole[element]} if element in whole else {}
        elif instruction.opcode == "tuple":
            held[name] = {
                at: held[operand][0] for at, operand in enumerate(instruction.operands) if 0 in held.get(operand, {})
            }
        elif instruction.opcode == "while":
            held[name] = _loop(program, instruction, held.get(instruction.operands[0], {}), found)
        elif instruction.opcode in PASSING:
            held[name] = dict(held.get(instruction.operands[0], {}))
        else:
            for operand in dict.fromkeys(instruction.operands):
                found += [Read(argument, instruction, operand) for argument in held.get(operand, {}).values()]
            updated = updated_in_place(program, instruction)
            held[name] = {at: held[operand][0] for at, operand in updated.items() if 0 in held.get(operand, {})}


def updated_in_place(program: Program, instruction: Instruction) -> dict[int, str]:
    """Element of the result (0 for an array) -> the operand whose memory it takes over."""
    if "output_to_operand_aliasing=" in instruction.rest:
        said = instruction.rest.split("output_to_operand_aliasing=", 1)[1].split("}, ", 1)[0]
        return {int(at or 0): instruction.operands[int(number)] for at, number in _ALIASED.findall(said)}
    if instruction.opcode in UPDATES:
        return {0: instruction.operands[0]}
    body = called(program, instruction)
    if not body:
        return {}
    inner = {each.name: each for each in body}
    results = body[-1].operands if body[-1].opcode == "tuple" else (body[-1].name,)
    found: dict[int, str] = {}
    for at, result in enumerate(results):
        root = _unwrapped(inner, result)
        if root.opcode in UPDATES:
            whole = _unwrapped(inner, root.operands[0])
            if whole.opcode == "parameter":
                found[at] = instruction.operands[parameter_number(whole)]
    return found


def called(program: Program, instruction: Instruction) -> tuple[Instruction, ...]:
    """The instructions that a fusion or a call stands for; empty for any other."""
    key = {"fusion": "calls", "call": "to_apply"}.get(instruction.opcode)
    return program.computations[instruction.attribute(key) or ""] if key else ()


def _unwrapped(inner: Mapping[str, Instruction], name: str) -> Instruction:
    """What a bitcast, or bitcasts of bitcasts, were made of."""
    while inner[name].opcode == "bitcast":
        name = inner[name].operands[0]
    return inner[name]


def _loop(program: Program, loop: Instruction, carried: Held, found: list[Read]) -> Held:
    """What a loop still holds unchanged at its end: the elements that its body hands on as they came."""
    body = loop.attribute("body") or ""
    unchanged = _handed_on(program, body)
    kept = {at: argument for at, argument in carried.items() if at in unchanged}
    # what the first pass reads is the argument also where later passes read something newer (a donated cache)
    _follow(program, body, {}, carried, found)
    return kept


def _handed_on(program: Program, body: str) -> set[int]:
    """Elements of a loop's tuple that its body returns as it got them."""
    came: dict[str, int] = {}
    carried = next(i.name for i in program.computations[body] if i.opcode == "parameter")
    for instruction in program.computations[body]:
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] == carried:
            came[instruction.name] = int(instruction.attribute("index") or 0)
        elif instruction.opcode == "bitcast" and instruction.operands[0] in came:
            came[instruction.name] = came[instruction.operands[0]]
    last = program.computations[body][-1]
    if last.opcode != "tuple":
        return set(range(len(elements(last.shape))))
    return {at for at, operand in enumerate(last.operands) if came.get(operand) == at}
