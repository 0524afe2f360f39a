"""A step's program over abstract arrays that lie as the layout says: what is compiled, or only lowered."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from kimi_jax.draft.config import draft_name
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.published import named_draft
from kimi_jax.draft.steps import DraftedSteps
from kimi_jax.loop import Limits, Rows, Steps
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.planning.ask import Ask
from kimi_jax.planning.record import Plan
from kimi_jax.problems import ProblemsError

Phase = Literal["decode", "prefill", "verify"]
"""``decode`` loops over steps of one token on the device, ``verify`` over speculative steps; ``prefill`` is one chunk."""

STOP_SLOTS = 8
"""Stop ids of a row in the call; a few bytes either way."""


class CompileError(ProblemsError):
    """A step that cannot be compiled or lowered as asked."""


def check_asked(phase: str, impl: str | None, platform: str, drafted: bool = False) -> None:
    """Refuses what no step on a platform has: kernels are built for GPUs, and interpreted ones are for tests.

    Raises:
      CompileError: an unknown phase, an implementation that the platform does not run, a draft without its phase or the reverse.
    """
    impls: tuple[Impl, ...] = ("reference", "pallas") if Implementations.of(platform).kernels else ("reference",)
    known = (("phase", phase, get_args(Phase)), (f"on {platform} impl", impl, (None, *impls)))
    unknown = [
        f"{name} {given!r}; built: {', '.join(filter(None, names))}"
        for name, given, names in known
        if given not in names
    ]
    if phase == "verify" and not drafted:
        unknown.append("phase 'verify' without a draft; name one with --draft")
    if drafted and phase in ("decode", "prefill"):
        unknown.append(f"a draft beside phase {phase!r}; only 'verify' runs one")
    if unknown:
        raise CompileError("Nothing to compile", unknown)


def described(draft: str | Path | DraftSpec | None) -> DraftSpec | None:
    """A draft by its published name, its config.json or its folder; one that is described already as it is."""
    return named_draft(draft) if isinstance(draft, str | Path) else draft


def steps_of(ask: Ask, mesh: Mesh | AbstractMesh, impls: Implementations | None, drafter: DraftSpec | None) -> Steps:
    """The programs of an ask: those of the target, or those that draft and verify."""
    given = (ask.config, ask.placed, mesh, ask.running, ask.length)
    return Steps(*given, impls=impls) if drafter is None else DraftedSteps(*given, impls=impls, drafter=drafter)


def tokens_of(ask: Ask, phase: Phase, drafter: DraftSpec | None) -> int:
    """New tokens of each row in a step: a chunk, one, or the anchor and its drafts."""
    if drafter is not None:
        return drafter.drafts + 1
    return ask.chunk if phase == "prefill" else 1


def phase_name(ask: Ask, phase: Phase, tokens: int) -> str:
    """What a program of ``tokens`` new tokens a row is called in reports."""
    if phase == "verify" and ask.draft is not None:
        return f"the speculative decode loop of draft {draft_name(ask.draft)}, {tokens} tokens verified a step"
    return "the decode loop" if phase == "decode" else f"a prefill chunk of {tokens:,} tokens"


TALLY = "cache.tally"
"""What a drafted cache counts for the host: a few bytes that no plan names."""


def is_cache(argument: str) -> bool:
    """Whether an argument is part of a sequence's cache, a draft's context rows included."""
    return argument.startswith("cache") and not argument.startswith(TALLY)


def is_carried(argument: str) -> bool:
    """Whether an argument goes from step to step and must be updated in place."""
    return argument.startswith("cache")


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
      phase: ``decode`` or ``verify``, the whole loop on the device; ``prefill``, one chunk.
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
    if phase != "prefill":
        program: Any = steps.decode(random=random)
        return program.trace(params, held, state, sampling, limits, array((), np.int32))
    ids = array((rows, tokens), np.int32, "batch", None)
    program = steps.prefill(random=random)
    return program.trace(params, held, ids, column(np.int32), state, sampling, limits)


def placed(steps: Steps, spec: ArraySpec) -> Any:
    """An array as the step is called with it: its placed shape and where it lies, no memory."""
    sharding = NamedSharding(steps.mesh, steps.layout.spec(spec))
    return jax.ShapeDtypeStruct(steps.layout.placed_shape(spec), spec.dtype, sharding=sharding)
