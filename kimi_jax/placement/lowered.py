"""What a lowered program says before any compiler sees it: arguments, donations, kernels called, collectives.

Counts are per step: a function counts as often as it is called, the body of a loop and each branch of a choice once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KERNEL = "__gpu$xla.gpu.triton"
"""What XLA calls a kernel whose code comes with the program."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")

DONATED = ("jax.buffer_donor", "tf.aliasing_output")
"""Attributes of an argument whose memory the results may take over."""

_TENSOR = re.compile(r"tensor<((?:\d+x)*)[a-z]+(\d+)\w*>")
_MESH_AXIS = re.compile(r'"(\w+)"=(\d+)')
_SHARDING = re.compile(r"@(\w+), \[(.*?)\]")
_FOLDER = re.compile(r'/ops/(\w+)/\w+\.py"')


@dataclass(frozen=True)
class Passed:
    """One array that the program is called with; JAX drops those that nothing reads.

    Attributes:
      name: what JAX calls it, such as ``params['lm_head.weight']``.
      bytes: on one device.
      donated: whether its memory is given up to the results.
    """

    name: str
    bytes: int
    donated: bool


@dataclass(frozen=True)
class Launch:
    """A kernel in the program.

    Attributes:
      op: folder of ``ops`` that launches it; "" where none does.
      name: the kernel's own.
    """

    op: str
    name: str


@dataclass(frozen=True)
class Exchange:
    """A collective in the program: its kind, such as ``all-reduce``, and bytes of the result on one device."""

    kind: str
    bytes: int


@dataclass(frozen=True)
class LoweredProgram:
    """All that was found.

    Attributes:
      arguments: in the order of the call.
      kernels: kernel -> how often a step calls it.
      collectives: collective -> how often; the compiler may join equal ones, so these are no fewer than it leaves.
    """

    arguments: tuple[Passed, ...]
    kernels: Mapping[Launch, int]
    collectives: Mapping[Exchange, int]


def read_lowered(module: Any) -> LoweredProgram:
    """Reads ``lowered.compiler_ir()``, a StableHLO module whose shardings are Shardy's."""
    top = [operation.operation for operation in module.body.operations]
    meshes = {_symbol(o): _mesh(str(o.attributes["mesh"])) for o in top if o.name == "sdy.mesh"}
    functions = {_symbol(o): o for o in top if o.name == "func.func"}
    counted = _Counts(functions).of("main")
    kernels = {found: times for found, times in counted.items() if isinstance(found, Launch)}
    collectives = {found: times for found, times in counted.items() if isinstance(found, Exchange)}
    return LoweredProgram(tuple(_arguments(functions["main"], meshes)), kernels, collectives)


class _Counts:
    """How often each function meets each kernel and collective, the functions that it calls included."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        self.known: dict[str, Counter[Launch | Exchange]] = {}

    def of(self, function: str) -> Counter[Launch | Exchange]:
        if function not in self.known:
            found: Counter[Launch | Exchange] = Counter()
            called: Counter[str] = Counter()
            for operation in _inside(self.functions[function]):
                if operation.name == "func.call":
                    called[operation.attributes["callee"].value] += 1
                elif met := _met(operation):
                    found[met] += 1
            for callee, times in called.items():
                for met, each in self.of(callee).items():
                    found[met] += times * each
            self.known[function] = found
        return self.known[function]


def _inside(operation: Any) -> Iterator[Any]:
    """Every operation in the regions of one, at any depth."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation
                yield from _inside(child.operation)


def _met(operation: Any) -> Launch | Exchange | None:
    kind = operation.name.removeprefix("stablehlo.")
    if kind in COLLECTIVES:
        return Exchange(kind.replace("_", "-"), sum(_bytes(str(result.type)) for result in operation.results))
    if kind != "custom_call" or operation.attributes["call_target_name"].value != KERNEL:
        return None
    folder = _FOLDER.search(str(operation.location))
    return Launch(folder[1] if folder else "", operation.attributes["mhlo.backend_config"]["name"].value)


def _arguments(main: Any, meshes: Mapping[str, Mapping[str, int]]) -> Iterator[Passed]:
    for argument, said in zip(main.regions[0].blocks[0].arguments, main.attributes["arg_attrs"], strict=True):
        cut = _cut(str(said["sdy.sharding"]), meshes) if "sdy.sharding" in said else 1
        name = str(argument.location).removeprefix('loc("').removesuffix('")')
        yield Passed(name, _bytes(str(argument.type)) // cut, any(key in said for key in DONATED))


def _cut(sharding: str, meshes: Mapping[str, Mapping[str, int]]) -> int:
    """Into how many pieces an array is cut."""
    found = _SHARDING.search(sharding)
    if found is None:
        raise ValueError(f"a sharding of another form: {sharding}")
    return math.prod(meshes[found[1]][axis] for axis in re.findall(r'"(\w+)"', found[2]))


def _bytes(tensor: str) -> int:
    """Bytes of ``tensor<2x3xbf16>``."""
    found = _TENSOR.fullmatch(tensor)
    if found is None:
        raise ValueError(f"no tensor of known size: {tensor}")
    return math.prod(map(int, filter(None, found[1].split("x")))) * max(int(found[2]), 8) // 8


def _mesh(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in _MESH_AXIS.findall(text)}


def _symbol(operation: Any) -> str:
    return operation.attributes["sym_name"].value
