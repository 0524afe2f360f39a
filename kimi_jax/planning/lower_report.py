"""The report of a lowered step, as plain values and as text.

Keys of the JSON form (sizes in bytes on one device; counts per step: a function as often as it is called, the body of a
loop and each branch of a choice once):
  config, layout, target, devices, phase, draft, batch, context, tokens, jax, implementations: as in ``compile_report.py``.
  evidence: what this says and what it does not, in one sentence.
  seconds: {lower}; peak_bytes: most memory of this process.
  arguments: {parameters, cache, all, donated, donated_count}: all are those passed; parameters count dropped ones too.
  plan: {weights, cache, dropped: {parameter: bytes}, agrees, problems}: dropped are parameters that a step never reads.
  kernels: [{op, name, calls}].
  collectives: [{kind, count, bytes}] as written; the compiler joins some of them.
"""

from collections.abc import Iterator
from typing import Any

import jax

from kimi_jax.draft.config import draft_name
from kimi_jax.planning.lower import Lowered
from kimi_jax.planning.step_program import phase_name

GIB = 1 << 30

EVIDENCE = (
    "Lowered, not compiled: weaker evidence. Whether the compiler takes the kernels, their registers and spills, "
    "temporary memory, copies and launches are unknown."
)


def as_json(found: Lowered) -> dict[str, Any]:
    """See the top of this module."""
    ask, plan, program = found.plan.ask, found.plan, found.program
    return {
        "config": ask.config.name,
        "layout": ask.placed.name,
        "target": ask.device.name,
        "devices": ask.placed.devices,
        "phase": found.phase,
        "draft": draft_name(ask.draft) if ask.draft else None,
        "batch": ask.rows,
        "context": ask.length,
        "tokens": found.tokens,
        "jax": jax.__version__,
        "implementations": vars(found.impls),
        "evidence": EVIDENCE,
        "seconds": {"lower": round(found.seconds, 3)},
        "peak_bytes": found.peak_bytes,
        "arguments": {
            "parameters": found.parameter_bytes,
            "cache": found.cache_bytes,
            "all": sum(argument.bytes for argument in program.arguments),
            "donated": found.donated_bytes,
            "donated_count": sum(argument.donated for argument in program.arguments),
        },
        "plan": {
            "weights": plan.weight_bytes,
            "cache": plan.cache_bytes,
            "dropped": dict(found.dropped),
            "agrees": not found.problems,
            "problems": found.problems,
        },
        "kernels": [{"op": kernel.op, "name": kernel.name, "calls": calls} for kernel, calls in _sorted_kernels(found)],
        "collectives": [
            {"kind": met.kind, "count": count, "bytes": met.bytes} for met, count in program.collectives.items()
        ],
    }


def _sorted_kernels(found: Lowered) -> list[tuple[Any, int]]:
    return sorted(found.program.kernels.items(), key=lambda item: (item[0].op, item[0].name))


def render(found: Lowered) -> str:
    """The report as text."""
    blocks = (_head(found), _bytes(found), _kernels(found), _collectives(found), _verdict(found))
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(found: Lowered) -> Iterator[str]:
    ask = found.plan.ask
    what = phase_name(ask, found.phase, found.tokens)
    yield f"{ask.config.name} on {ask.placed.name}: {what}, lowered for {ask.placed.devices} x {ask.device.name}"
    yield f"batch {ask.rows}, {ask.length:,} tokens a sequence, JAX {jax.__version__}"
    yield f"ops: {found.impls}"
    yield f"lowered in {found.seconds:.1f} s, at most {found.peak_bytes / GIB:.2f} GiB of this machine's memory"


def _bytes(found: Lowered) -> Iterator[str]:
    yield "bytes on one device"
    yield f"  {'parameters':12}{found.parameter_bytes:>20,}  plan {found.plan.weight_bytes:,}"
    yield f"  {'caches':12}{found.cache_bytes:>20,}  plan {found.plan.cache_bytes:,}"
    count = sum(argument.donated for argument in found.program.arguments)
    yield f"  {'donated':12}{found.donated_bytes:>20,}  {count} arguments"
    if found.dropped:
        count, size = len(found.dropped), sum(found.dropped.values())
        yield f"  {count} parameter{'' if count == 1 else 's'} of {size:,} bytes never read: {', '.join(found.dropped)}"


def _kernels(found: Lowered) -> Iterator[str]:
    yield f"{'kernels in a step':24}{'op':12}{'calls':>8}"
    for kernel, calls in _sorted_kernels(found):
        yield f"  {kernel.name:22}{kernel.op:12}{calls:>8}"
    yield f"  {'total':34}{sum(found.program.kernels.values()):>8}"


def _collectives(found: Lowered) -> Iterator[str]:
    yield f"{'collectives, as written':24}{'count':>8}{'bytes each':>16}"
    for met, count in found.program.collectives.items():
        yield f"  {met.kind:22}{count:>8}{met.bytes:>16,}"
    yield f"  {'total':22}{sum(found.program.collectives.values()):>8}"


def _verdict(found: Lowered) -> Iterator[str]:
    yield from (f"wrong: {line}" for line in found.problems)
    if not found.problems:
        yield "arguments equal the plan; the caches and nothing else are donated; every op calls its kernels"
    yield EVIDENCE
