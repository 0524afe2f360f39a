"""A full-size step compiled for a target without weights and without devices, held against the plan of its bytes."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

from kimi_jax.config import KimiConfig
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.placement.aot import PLATFORM, compile_only_devices
from kimi_jax.placement.audit import Audit, audit
from kimi_jax.placement.budget import load_budget, over_budget
from kimi_jax.placement.codeobjects import Kernel, of_program, read_kernels
from kimi_jax.placement.compiler import compiler_options
from kimi_jax.placement.device import Device
from kimi_jax.placement.hlo import parse
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.planning.expected_bytes import expected_bytes
from kimi_jax.planning.peak import peak_bytes
from kimi_jax.planning.plan import plan
from kimi_jax.planning.record import Plan
from kimi_jax.planning.step_parts import part_of_step
from kimi_jax.planning.step_program import (
    Phase,
    byte_problems,
    check_asked,
    described,
    is_cache,
    is_carried,
    never_passed,
    steps_of,
    tokens_of,
    trace_step,
)
from kimi_jax.precision import ExpertForm


@dataclass(frozen=True)
class Seconds:
    """Wall time of each stage."""

    lower: float
    compile: float


@dataclass(frozen=True)
class Compiled:
    """One compiled step.

    Attributes:
      plan: of the same ask; its bytes are what the arguments must weigh.
      phase: ``decode`` and ``verify`` loop over steps on the device; ``prefill`` is one chunk of ``tokens`` and the first drawn id.
      tokens: new tokens of each row in a step: of a verification those that the target looks at.
      impls: what each op runs.
      audit: what the compiler's output says.
      kernels: of a GPU target; one that this process built for an earlier program is found by its name (``of_program``).
      dropped: parameters that the step never reads, which JAX therefore does not pass: name -> bytes on one device.
      seconds: how long it took.
      peak_bytes: most memory that this process has held.
      over: how the step breaks its budget, one line each; None where no budget was named.
    """

    plan: Plan
    phase: Phase
    tokens: int
    impls: Implementations
    audit: Audit
    kernels: tuple[Kernel, ...]
    dropped: Mapping[str, int]
    seconds: Seconds
    peak_bytes: int
    over: tuple[str, ...] | None = None

    @property
    def parameter_bytes(self) -> int:
        """Parameters on one device: those passed and those dropped."""
        passed = sum(argument.bytes for argument in self.audit.arguments if argument.name.startswith("params["))
        return passed + sum(self.dropped.values())

    @property
    def cache_bytes(self) -> int:
        """Caches on one device, as passed."""
        return sum(argument.bytes for argument in self.audit.arguments if is_cache(argument.name))

    @property
    def carried_bytes(self) -> int:
        """What a step must update in place: the caches, and what a draft counts."""
        return sum(argument.bytes for argument in self.audit.arguments if is_carried(argument.name))

    @property
    def problems(self) -> list[str]:
        """Where the compiled step and the plan disagree; empty when they do not."""
        found = byte_problems(self.parameter_bytes, self.cache_bytes, self.plan)
        lost = [a.name for a in self.audit.arguments if is_carried(a.name) and a.name not in self.audit.aliased]
        if lost or self.audit.memory.aliased != self.carried_bytes:
            named = f": {', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''}" if lost else ""
            found.append(
                f"{self.audit.memory.aliased:,} bytes are updated in place, the caches take {self.carried_bytes:,}{named}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; its keys are documented in ``planning/compile_report.py``."""
        from kimi_jax.planning.compile_report import as_json

        return as_json(self)

    def __str__(self) -> str:
        from kimi_jax.planning.compile_report import render

        return render(self)


def compile_step(
    config_or_name: KimiConfig | str | Path,
    layout: str | Path | Layout = "tp8",
    target: str | Path | Device = "mi355x",
    phase: Phase = "decode",
    context: int | None = None,
    batch: int = 1,
    *,
    tokens: int = 2048,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    index_dtype: str | None = None,
    experts: ExpertForm | None = None,
    fp8: str = "none",
    draft: str | Path | DraftSpec | None = None,
    random: bool = False,
    impl: Impl | None = None,
    budget: str | Path | None = None,
) -> Compiled:
    """Compiles a step of a model at full size; nothing is allocated and nothing runs.

    Args:
      config_or_name: as for ``plan``.
      layout: as for ``plan``.
      target: a device whose file has a [compiler] table, or ``cpu`` for fake devices of this machine.
      phase: ``decode`` or ``verify``, the whole loop on the device; ``prefill``, one chunk.
      context: tokens that each sequence can hold; the model's limit where omitted.
      batch: sequences of the call, over the whole mesh.
      tokens: new tokens of each row in a prefill chunk.
      dtype, kv_dtype, index_dtype, experts, fp8: as for ``plan``.
      draft: of a verification: a published name, a draft's folder or its config.json.
      random: whether rows may draw with a temperature.
      impl: what every op runs: ``reference`` (XLA) or ``pallas``; where omitted, what the target would run.
      budget: shipped name or file of the budget that the step is held against.

    Raises:
      ConfigError, DeviceError, DraftError, PlanError, LayoutError: as ``plan``.
      TargetError: the target cannot be compiled for on this machine, and why.
      CompileError: an unknown phase or implementation, a draft without its phase or the reverse.
    """
    allowed = None if budget is None else load_budget(budget)
    drafter = described(draft)
    planned = plan(
        config_or_name, layout, target, context, batch, dtype=dtype, kv_dtype=kv_dtype, index_dtype=index_dtype,
        experts=experts, fp8=fp8, prefill_chunk=tokens, draft=drafter and drafter.sizes,
    )  # fmt: skip
    ask = planned.ask
    check_asked(phase, impl, ask.device.platform, drafter is not None)
    compiles_only = ask.device.platform != "cpu"
    devices = compile_only_devices(ask.device, ask.placed.devices) if compiles_only else jax.devices("cpu")
    impls = None if impl is None else Implementations.all(impl)
    steps = steps_of(ask, make_mesh(ask.placed, devices), impls, drafter)
    chunk = tokens_of(ask, phase, drafter)
    with tempfile.TemporaryDirectory(prefix="kimi-jax-compile-") as folder:
        earlier = _kernel_files()
        began = time.perf_counter()
        lowered = trace_step(steps, phase, ask.rows, chunk, random).lower()
        lowered_at = time.perf_counter()
        with _kernels_kept():
            compiled = lowered.compile(compiler_options=_options(folder) if compiles_only else None)
        done = time.perf_counter()
        thunks = _launch_sequence(folder)
    program = parse(compiled.as_text())
    loops = phase != "prefill"
    expected = expected_bytes(planned, 0 if drafter is None else drafter.drafts) if loops else None
    found = audit(program, compiled.memory_analysis(), part_of_step, thunks, expected, loops_over_steps=loops)
    started = {kernel.name for kernel in found.launches.kernels} if found.launches else set()
    kernels = of_program(read_kernels(_kernel_files() - earlier), read_kernels(earlier), started)
    dropped = never_passed(steps, found.arguments)
    seconds = Seconds(lowered_at - began, done - lowered_at)
    over = None if allowed is None else tuple(over_budget(found, kernels, allowed))
    return Compiled(planned, phase, chunk, steps.implementations, found, kernels, dropped, seconds, peak_bytes(), over)


@cache
def _kernel_folder() -> Path:
    """Where the compiler leaves every kernel that it builds in this process; it does not build one twice."""
    folder = tempfile.mkdtemp(prefix="kimi-jax-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _kernel_files() -> set[Path]:
    return set(_kernel_folder().glob("*.hsaco"))


@contextmanager
def _kernels_kept() -> Iterator[None]:
    """The compiler's environment while it compiles; it decides what is written beside the program, not the program."""
    names = {"TF_XLA_HSACO_CACHE_DIR": str(_kernel_folder()), "TF_XLA_HSACO_BITCODE_SIZE_THRESHOLD": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _options(folder: str) -> dict[str, Any]:
    """What a running step is compiled with, and: write the launch sequence, no kernel's intermediate code."""
    always = compiler_options(PLATFORM) or {}  # options given here replace those of the step
    return {**always, "xla_dump_to": folder, "xla_dump_hlo_pass_re": "^$", "xla_dump_emitter_re": "^$"}


def _launch_sequence(folder: str) -> str | None:
    """The compiler's list of launches; None where the target writes none."""
    found = sorted(Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"))
    return found[0].read_text() if found else None
