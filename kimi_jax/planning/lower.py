"""A full-size step lowered for a target without its compiler: what can still be held against the plan where no plugin is.

Weaker than a compile: kernels are written for the chip and never built, so what they take of it is unknown.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.config import KimiConfig
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.placement.device import Device
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.lowered import Launch, LoweredProgram, read_lowered
from kimi_jax.placement.mesh import abstract_mesh
from kimi_jax.placement.rocm.problem import TargetError
from kimi_jax.planning.expected_kernels import expected_kernels
from kimi_jax.planning.peak import peak_bytes
from kimi_jax.planning.plan import plan
from kimi_jax.planning.record import Plan
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

PLATFORM = "rocm"
"""What kernels can be lowered for without a plugin, and are meant for."""


@dataclass(frozen=True)
class Lowered:
    """One lowered step.

    Attributes:
      plan: of the same ask; its bytes are what the arguments must weigh.
      phase: ``decode`` and ``verify`` loop over steps on the device; ``prefill`` is one chunk of ``tokens`` and the first drawn id.
      tokens: new tokens of each row in a step.
      impls: what each op runs.
      program: what the lowered program says.
      dropped: parameters that the step never reads, which JAX therefore does not pass: name -> bytes on one device.
      expected: kernel -> fewest calls, one for each layer that has it.
      seconds: how long tracing and lowering took.
      peak_bytes: most memory that this process has held.
    """

    plan: Plan
    phase: Phase
    tokens: int
    impls: Implementations
    program: LoweredProgram
    dropped: Mapping[str, int]
    expected: Mapping[Launch, int]
    seconds: float
    peak_bytes: int

    @property
    def parameter_bytes(self) -> int:
        """Parameters on one device: those passed and those dropped."""
        passed = sum(a.bytes for a in self.program.arguments if a.name.startswith("params["))
        return passed + sum(self.dropped.values())

    @property
    def cache_bytes(self) -> int:
        """Caches on one device, as passed."""
        return sum(argument.bytes for argument in self.program.arguments if is_cache(argument.name))

    @property
    def donated_bytes(self) -> int:
        """Arguments on one device whose memory the results may take over."""
        return sum(argument.bytes for argument in self.program.arguments if argument.donated)

    @property
    def problems(self) -> list[str]:
        """Where the lowered step disagrees with the plan or misses kernels; empty when it does not."""
        found = byte_problems(self.parameter_bytes, self.cache_bytes, self.plan)
        wrong = [a.name for a in self.program.arguments if a.donated != is_carried(a.name)]
        if wrong:
            named = f"{', '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''}"
            found.append(f"{self.donated_bytes:,} bytes are donated, the caches take {self.cache_bytes:,}: {named}")
        called = self.program.kernels
        return found + [
            f"{kernel.op} calls {kernel.name} {called.get(kernel, 0)} times in a step; the model has {least} places for it"
            for kernel, least in self.expected.items()
            if called.get(kernel, 0) < least
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; its keys are documented in ``planning/lower_report.py``."""
        from kimi_jax.planning.lower_report import as_json

        return as_json(self)

    def __str__(self) -> str:
        from kimi_jax.planning.lower_report import render

        return render(self)


def lower_step(
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
) -> Lowered:
    """Lowers a step of a model at full size for a target; needs no plugin, no wheel and no devices.

    Args:
      config_or_name, layout, phase, context, batch, tokens, dtype, kv_dtype, index_dtype, experts, fp8, draft, random, impl: as
        ``compile_step``.
      target: a ROCm device; its file need not have a [compiler] table.

    Raises:
      ConfigError, DeviceError, DraftError, PlanError, LayoutError: as ``plan``.
      TargetError: the target is of another platform.
      CompileError: an unknown phase or implementation, a draft without its phase or the reverse.
    """
    drafter = described(draft)
    planned = plan(
        config_or_name, layout, target, context, batch, dtype=dtype, kv_dtype=kv_dtype, index_dtype=index_dtype,
        experts=experts, fp8=fp8, prefill_chunk=tokens, draft=drafter and drafter.sizes,
    )  # fmt: skip
    ask = planned.ask
    check_asked(phase, impl, ask.device.platform, drafter is not None)
    if ask.device.platform != PLATFORM or not ask.device.target:
        named = f"its platform is {ask.device.platform!r} and its chip {ask.device.target!r}"
        works = "What works: --lower for mi355x or mi300x, or --target cpu without --lower."
        raise TargetError(
            f"{ask.device.name} is nothing to lower for", [f"{named}; {PLATFORM} chips are lowered for"], works
        )
    impls = None if impl is None else Implementations.all(impl)
    mesh = abstract_mesh(ask.placed, ask.device)
    steps = steps_of(ask, mesh, impls, drafter)
    chunk = tokens_of(ask, phase, drafter)
    began = time.perf_counter()
    lowered = trace_step(steps, phase, ask.rows, chunk, random).lower(lowering_platforms=(PLATFORM,))
    seconds = time.perf_counter() - began
    program = read_lowered(lowered.compiler_ir())
    dropped = never_passed(steps, program.arguments)
    rows = ask.rows // ask.placed.parts("batch")
    expected = expected_kernels(
        ask.config, steps.implementations, rows, chunk, random, ask.length, "attention" in ask.fp8.groups
    )
    if phase == "verify":  # recurrent layers keep their states until the verdict
        step = Launch("kda", "kda_step")
        held = {Launch("kda", name): expected[step] for name in ("kda_verify", "kda_fold") if step in expected}
        expected = {**{kernel: least for kernel, least in expected.items() if kernel.op != "kda"}, **held}
    return Lowered(
        planned, phase, chunk, steps.implementations, program, dropped, expected, seconds, peak_bytes()
    )  # fmt: skip
