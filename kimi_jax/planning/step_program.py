"""A step's program over abstract arrays that lie as the layout says: what is compiled, or only lowered."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding

from kimi_jax.loop import Limits, Rows, Steps
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.planning.record import Plan
from kimi_jax.problems import ProblemsError

Phase = Literal["decode", "prefill"]

STOP_SLOTS = 8
"""Stop ids of a row in the call; a few bytes either way."""


class CompileError(ProblemsError):
    """A step that cannot be compiled or lowered as asked."""


def check_asked(phase: str, impl: str | None, platform: str) -> None:
    """Refuses what no step on a platform has: kernels are built for GPUs, and interpreted ones are for tests.

    Raises:
      CompileError: an unknown phase, or an implementation that the platform does not run.
    """
    impls: tuple[Impl, ...] = ("reference", "pallas") if Implementations.of(platform).kernels else ("reference",)
    known = (("phase", phase, get_args(Phase)), (f"on {platform} impl", impl, (None, *impls)))
    unknown = [
        f"{name} {given!r}; built: {', '.join(filter(None, names))}"
        for name, given, names in known
        if given not in names
    ]
    if unknown:
        raise CompileError("Nothing to compile", unknown)


def never_passed(steps: Steps, arguments: Iterable[Any]) -> dict[str, int]:
    """Parameters that a program never reads, which JAX therefore does not pass: name -> bytes on one device."""
    passed = {argument.name for argument in arguments}
    specs = steps.parameters.items()
    return {name: steps.layout.local_bytes(spec) for name, spec in specs if f"params['{name}']" not in passed}


def byte_problems(parameters: int, cache: int, planned: Plan) -> list[str]:
    """Where the bytes of a program's arguments on one device are not the planned ones."""
    found = []
    if parameters != planned.weight_bytes:
        found.append(f"parameters take {parameters:,} bytes, the plan says {planned.weight_bytes:,}")
    if cache != planned.cache_bytes:
        found.append(f"caches take {cache:,} bytes, the plan says {planned.cache_bytes:,}")
    return found


def trace_step(steps: Steps, phase: Phase, rows: int, tokens: int, random: bool) -> Any:
    """The traced program of ``rows`` sequences; nothing is allocated.

    Args:
      steps: over a mesh of devices, or an abstract one.
      phase: ``decode``, the whole loop on the device; ``prefill``, one chunk.
      rows: sequences of the call, over the whole mesh.
      tokens: new tokens of each row in a prefill chunk.
      random: whether rows may draw with a temperature.
    """

    def array(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
        return placed(steps, ArraySpec(shape, np.dtype(dtype), axes))

    def column(dtype: Any) -> Any:
        return array((rows,), dtype, "batch")

    params = {name: placed(steps, spec) for name, spec in steps.parameters.items()}
    described = steps.describe_cache(rows)
    held = jax.tree.map(partial(placed, steps), described, is_leaf=lambda x: isinstance(x, ArraySpec))
    state = Rows(*(column(np.int32) for _ in Rows._fields))
    sampling = Sampling(column(np.float32), column(np.float32), column(np.int32), column(np.uint32))
    stops = array((rows, STOP_SLOTS), np.int32, "batch", None)
    limits = Limits(array((steps.config.vocab,), np.bool_, "vocab"), stops)
    if phase == "decode":
        program: Any = steps.decode(random=random)
        return program.trace(params, held, state, sampling, limits, array((), np.int32))
    ids = array((rows, tokens), np.int32, "batch", None)
    program = steps.prefill(random=random)
    return program.trace(params, held, ids, column(np.int32), state, sampling, limits)


def placed(steps: Steps, spec: ArraySpec) -> Any:
    """An array as the step is called with it: its placed shape and where it lies, no memory."""
    sharding = NamedSharding(steps.mesh, steps.layout.spec(spec))
    return jax.ShapeDtypeStruct(steps.layout.placed_shape(spec), spec.dtype, sharding=sharding)
