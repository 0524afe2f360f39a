"""The report of a compiled step, as plain values and as text.

Keys of the JSON form (sizes in bytes on one device; counts per step, the body of a loop once):
  config, layout, target, devices, phase, draft, batch, context, tokens, jax: what was compiled; draft is null or its name.
  implementations: {op: reference, pallas or interpret}.
  seconds: {lower, compile}; peak_bytes: most memory of this process.
  memory: {arguments, outputs, aliased, temp}.
  plan: {weights, cache, dropped: {parameter: bytes}, agrees, problems}: dropped are parameters that a step never reads.
  collectives: [{part, kind, count, bytes, participants}].
  launches: {step, inner, outside, kinds, parts}, or null where the target has no launch sequence.
  moved: {bytes, roofline, ratio, arguments, temps, loops, parts, again: [{argument, count, bytes}]}: what a decode step reads
    and writes, of parameters and caches and of the rest, and what it must by the plan; with loops inside the step at least
    that; again are arguments that more than one instruction reads, with the bytes of all but the first; null for a prefill
    chunk.
  copies: [{part, bytes, instruction, op_name}] above 1 MiB.
  weight_readers: [{part, op_name, opcode, count, bytes, writes, argument}] that are no product, kernel or slice.
  kernels: {count, vgprs, agprs, shared, spilling: [{name, vgprs, spills, scratch}], each: [{name, launches, grid, threads,
    shared, vgprs, spills}]}: the most of each number, and every kernel that a step starts; null where it is not known.
  budget: lines that say what is over budget, or null where no budget was named.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from kimi_jax.draft.config import draft_name
from kimi_jax.placement.audit import Launches, Reader
from kimi_jax.placement.codeobjects import Kernel
from kimi_jax.placement.moved import Again, Moved
from kimi_jax.planning.compile import Compiled
from kimi_jax.planning.step_program import phase_name

GIB = 1 << 30
SHOWN = 12
"""Lines of a list in the text; the JSON form has all."""


def as_json(found: Compiled) -> dict[str, Any]:
    """See the top of this module."""
    ask, audit, plan = found.plan.ask, found.audit, found.plan
    collectives = Counter((c.part, c.kind, c.bytes, c.participants) for c in audit.collectives)
    launches = audit.launches
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
        "seconds": {"lower": round(found.seconds.lower, 3), "compile": round(found.seconds.compile, 3)},
        "peak_bytes": found.peak_bytes,
        "memory": vars(audit.memory),
        "plan": {
            "weights": plan.weight_bytes,
            "cache": plan.cache_bytes,
            "dropped": dict(found.dropped),
            "agrees": not found.problems,
            "problems": found.problems,
        },
        "collectives": [
            {"part": part, "kind": kind, "count": count, "bytes": size, "participants": devices}
            for (part, kind, size, devices), count in collectives.items()
        ],
        "launches": None
        if launches is None
        else {
            "step": launches.step,
            "inner": launches.inner,
            "outside": launches.outside,
            "kinds": dict(launches.kinds),
            "parts": dict(launches.parts),
        },
        "moved": _moved(audit.moved),
        "copies": [vars(copy) for copy in audit.copies],
        "weight_readers": [
            {**vars(reader), "argument": argument, "count": count}
            for argument, (reader, count) in _alike(audit.readers).items()
        ],
        "kernels": _kernels(found.kernels, launches),
        "budget": None if found.over is None else list(found.over),
    }


def _of_any_layer(argument: str) -> str:
    return re.sub(r"layers\.\d+", "layers.*", argument)


def _moved(moved: Moved | None) -> dict[str, Any] | None:
    if moved is None:
        return None
    again: dict[str, list[Again]] = {}
    for each in moved.again:
        again.setdefault(_of_any_layer(each.argument), []).append(each)
    return {
        "bytes": round(moved.bytes),
        "roofline": round(moved.least),
        "ratio": round(moved.ratio, 4),
        "arguments": round(moved.arguments),
        "temps": round(moved.temps),
        "loops": moved.loops,
        "parts": {part: round(size) for part, size in moved.parts},
        "again": [
            {"argument": argument, "count": len(alike), "bytes": round(sum(each.bytes for each in alike))}
            for argument, alike in again.items()
        ],
    }


def _alike(readers: tuple[Reader, ...]) -> dict[str, tuple[Reader, int]]:
    """Readers that differ only by their layer: the first of each kind and how many, by argument and operation."""
    groups: dict[tuple[str, str, int], list[Reader]] = {}
    for reader in readers:
        argument = _of_any_layer(reader.argument)
        groups.setdefault((argument, reader.op_name, reader.writes), []).append(reader)
    named: dict[str, tuple[Reader, int]] = {}
    for (argument, _, _), alike in groups.items():
        key = argument if argument not in named else f"{argument} ({alike[0].instruction})"
        named[key] = (alike[0], len(alike))
    return named


def _kernels(kernels: tuple[Kernel, ...], launches: Launches | None) -> dict[str, Any]:
    def most(values: Iterator[int]) -> int:
        return max(values, default=0)

    built = {kernel.name: kernel for kernel in kernels}
    started = launches.kernels if launches else ()
    return {
        "count": len(kernels),
        "vgprs": most(kernel.vgprs for kernel in kernels),
        "agprs": most(kernel.agprs for kernel in kernels),
        "shared": most(iter([*(kernel.shared for kernel in kernels), *(kernel.shared for kernel in started)])),
        "spilling": [
            {"name": k.name, "vgprs": k.vgprs, "spills": k.spills, "scratch": k.scratch} for k in kernels if k.spills
        ],
        "each": [
            {
                "name": kernel.name,
                "launches": kernel.count,
                "grid": list(kernel.grid),
                "threads": kernel.threads,
                "shared": kernel.shared,
                "vgprs": built[kernel.name].vgprs if kernel.name in built else None,
                "spills": built[kernel.name].spills if kernel.name in built else None,
            }
            for kernel in started
        ],
    }


def render(found: Compiled) -> str:
    """The report as text."""
    costs = (_memory, _collectives, _launches, _bytes_moved, _lists)
    blocks = (_head(found), *(cost(found) for cost in costs), _verdict(found))
    return "\n\n".join(filter(None, ("\n".join(block) for block in blocks)))


def _head(found: Compiled) -> Iterator[str]:
    ask, seconds = found.plan.ask, found.seconds
    what = phase_name(ask, found.phase, found.tokens)
    yield f"{ask.config.name} on {ask.placed.name}: {what}, compiled for {ask.placed.devices} x {ask.device.name}"
    yield f"batch {ask.rows}, {ask.length:,} tokens a sequence, JAX {jax.__version__}"
    yield f"ops: {found.impls}"
    yield (
        f"lowered in {seconds.lower:.1f} s, compiled in {seconds.compile:.1f} s, "
        f"at most {found.peak_bytes / GIB:.2f} GiB of this machine's memory"
    )


def _memory(found: Compiled) -> Iterator[str]:
    memory = found.audit.memory
    yield "bytes on one device"
    for name, size in vars(memory).items():
        yield f"  {name:12}{size:>20,}"
    yield f"  {'parameters':12}{found.parameter_bytes:>20,}  plan {found.plan.weight_bytes:,}"
    yield f"  {'caches':12}{found.cache_bytes:>20,}  plan {found.plan.cache_bytes:,}"
    if found.dropped:
        count, size = len(found.dropped), sum(found.dropped.values())
        yield f"  {count} parameter{'' if count == 1 else 's'} of {size:,} bytes never read: {', '.join(found.dropped)}"


def _collectives(found: Compiled) -> Iterator[str]:
    yield f"{'collectives in a step':24}{'kind':20}{'count':>6}{'bytes each':>16}{'devices':>9}"
    counted = Counter((c.part, c.kind, c.bytes, c.participants) for c in found.audit.collectives)
    for (part, kind, size, devices), count in counted.most_common():
        yield f"  {part:22}{kind:20}{count:>6}{size:>16,}{devices:>9}"
    yield f"  {'total':42}{counted.total():>6}"


def _launches(found: Compiled) -> Iterator[str]:
    launches = found.audit.launches
    if launches is not None:
        yield f"launches: {launches.step:,} in a step, {launches.inner:,} in its inner loops (each body once)"
        yield "  " + ", ".join(f"{kind} {count:,}" for kind, count in launches.kinds)
        yield "  " + ", ".join(f"{part} {count:,}" for part, count in launches.parts)
    if found.kernels:
        kernels = _kernels(found.kernels, launches)
        yield (
            f"{kernels['count']} kernels: at most {kernels['vgprs']} VGPRs, {kernels['shared']:,} bytes of LDS; "
            f"{len(kernels['spilling'])} spill"
        )
        yield f"  {'most often started':40}{'launches':>9}{'grid':>16}{'threads':>8}{'LDS':>8}{'VGPRs':>7}{'spills':>7}"
        for one in kernels["each"][:SHOWN]:
            grid = " x ".join(map(str, one["grid"]))
            numbers = (one["launches"], grid, one["threads"], one["shared"], one["vgprs"], one["spills"])
            yield f"  {one['name'][:39]:40}" + "".join(
                f"{value!s:>{w}}" for value, w in zip(numbers, (9, 16, 8, 8, 7, 7), strict=True)
            )


def _bytes_moved(found: Compiled) -> Iterator[str]:
    moved = found.audit.moved
    if moved is not None:
        least = f"at least (the bodies of its {moved.loops} loops once) " if moved.loops else ""
        counted = f"{moved.bytes:,.0f} bytes, {moved.ratio:.4f} of the {moved.least:,.0f} that it must"
        yield f"a step reads and writes {least}{counted}"
        yield f"  arguments {moved.arguments:,.0f}, everything else {moved.temps:,.0f}"
        yield "  " + ", ".join(f"{part} {size:,.0f}" for part, size in moved.parts)
        more = sum(each.bytes for each in moved.again)
        yield f"  {len(moved.again)} arguments read more than once: {more:,.0f} bytes"


def _lists(found: Compiled) -> Iterator[str]:
    copies = found.audit.copies
    yield f"copies above 1 MiB: {len(copies)}"
    for copy in copies[:SHOWN]:
        yield f"  {copy.part}: {copy.bytes:,} bytes, {copy.op_name or copy.instruction}"
    alike = _alike(found.audit.readers)
    yield f"instructions that read a parameter above 1 MB and are no product, kernel or slice: {len(found.audit.readers)}"
    for argument, (reader, count) in list(alike.items())[:SHOWN]:
        yield f"  {count} x {reader.part}: {reader.op_name or reader.instruction} reads {argument}, writes {reader.writes:,}"


def _verdict(found: Compiled) -> Iterator[str]:
    yield from (f"differs from the plan: {line}" for line in found.problems)
    if not found.problems:
        yield "arguments equal the plan; every cache is updated in place"
    if found.over is not None:
        yield from (f"over budget: {line}" for line in found.over)
        if not found.over:
            yield "within budget"
