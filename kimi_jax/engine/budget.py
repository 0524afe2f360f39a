"""How many pages and checkpoints a device's memory holds beside the weights, from the declarations that the planner reads."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kimi_jax.cache import describe_sources
from kimi_jax.draft.slot_steps import slot_steps
from kimi_jax.draft.steps import DraftedSteps
from kimi_jax.engine.limits import EngineLimits, LimitsError
from kimi_jax.loop import Steps
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.bytes import amount, bytes_of
from kimi_jax.placement.compiler import platform_of_mesh
from kimi_jax.precision import LATENTS
from kimi_jax.slots import page_unit
from kimi_jax.vision_steps import VisionSteps, call_bytes

CHECKPOINT_SHARE = 4
"""Part of what is left beside one full sequence that goes to checkpoints; the rest goes to pages."""

CPU_SEQUENCES, CPU_CHECKPOINTS = 2, 4
"""On a CPU: pages of so many full sequences per slot, and checkpoints per slot; its memory is for other things too."""

LARGEST_PAGE = 64
MOST_SHARE = 0.97


@dataclass(frozen=True)
class Costs:
    """Bytes on one device; slot, checkpoint and page are one more in every group of devices.

    Attributes:
      weights: parameters, those of the vision tower and of a draft included.
      scratch: what a prefill call keeps while it runs, or a call of the tower; the rest that programs need is outside the share.
      slot: recurrent states and penalty counts of one sequence.
      checkpoint: recurrent states of one checkpoint.
      page: latent rows of one page, and context rows of a draft.
    """

    weights: int
    scratch: int
    slot: int
    checkpoint: int
    page: int

    def need(self, slots: int, pages: int) -> int:
        """Bytes of all but checkpoints, with so many slots and pages in every group."""
        return self.weights + self.scratch + slots * self.slot + pages * self.page


def costs(steps: Steps, page: int, chunk: int, tower: VisionSteps | None = None) -> Costs:
    """What an engine's parts cost on one device under the layout of a model, with a vision tower beside it."""
    groups = steps.parallel.size("batch")

    def cache(slots: int, pages: int, checkpoints: int) -> int:
        counts = (slots * groups, pages * groups, page, checkpoints * groups)
        described: Any = slot_steps(steps, *counts).describe_cache()
        return _bytes(steps, jax.tree.leaves(described, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)))

    one = cache(1, 1, 1)
    scratch = _bytes(steps, [describe_sources(steps.config, chunk, steps.precision)])
    if isinstance(steps, DraftedSteps):
        scratch += _bytes(steps, [describe_tapped(steps, chunk)])
    seeing = call_bytes(tower.vision, tower.layout, tower.buckets[-1], tower.block) if tower else 0
    return Costs(
        weights=_bytes(steps, steps.parameters.values()) + (tower.weight_bytes if tower else 0),
        scratch=max(scratch, seeing),  # they never run at once
        slot=cache(2, 1, 1) - one,
        checkpoint=cache(1, 1, 2) - one,
        page=cache(1, 2, 1) - one,
    )


def describe_tapped(steps: DraftedSteps, tokens: int) -> ArraySpec:
    """The tapped vectors of a call of ``tokens`` tokens, which end with it."""
    shape = (tokens, len(steps.drafter.taps), steps.config.hidden)
    return ArraySpec(shape, np.dtype(steps.precision.activation), (None, None, "embed"))


def engine_limits(
    steps: Steps,
    *,
    slots: int = 8,
    page: int | None = None,
    chunk: int = 512,
    queue: int = 256,
    prefix: bool = True,
    share: float = 0.9,
    pages: int | None = None,
    checkpoints: int | None = None,
    device_bytes: int | None = None,
    tower: VisionSteps | None = None,
) -> EngineLimits:
    """Sizes of an engine that fit the memory of the devices.

    Args:
      steps: of the loaded model.
      slots: sequences decoded together; rounded up to equal shares of the groups of devices.
      page: tokens of a page; where omitted, the largest that fits a sequence and the kernels, at most 64.
      chunk: most prompt tokens of one prefill call.
      queue: requests that may wait.
      prefix: whether prompts may start from what others have left.
      share: of a device's memory for weights, caches and checkpoints; the rest is for what programs need while they run.
      pages: instead of as many as fit; rounded up like slots.
      checkpoints: instead of a part of what is left.
      device_bytes: memory of one device; where omitted, what the device says (of a CPU, its part of half the machine's).
      tower: that looks at images beside the engine, on the same devices.

    Raises:
      LimitsError: not even one full sequence fits beside the weights and slots; names the smallest change that would do.
      SlotsError: a page that fits neither sequences nor kernels.
    """
    groups = steps.parallel.size("batch")
    page, chunk = fitting_page(steps) if page is None else page, min(chunk, steps.capacity)
    one = costs(steps, page, chunk, tower)
    total = memory_of(steps) if device_bytes is None else device_bytes
    usable, local, least = math.floor(total * share), -(-slots // groups), -(-steps.capacity // page)
    wanted = least if pages is None else -(-pages // groups)
    if one.need(local, wanted) > usable:
        other = _narrowed(steps)
        narrow = costs(other, page, chunk, tower) if other else None
        raise _refusal(steps, one, narrow, local, wanted, page, total, share)
    left = usable - one.need(local, wanted)
    if not prefix:
        kept = 0
    elif checkpoints is None:
        kept = left // CHECKPOINT_SHARE // one.checkpoint
    else:
        kept = -(-checkpoints // groups)
    fitting = (usable - one.need(local, 0) - kept * one.checkpoint) // one.page
    if fitting < wanted:
        raise LimitsError(
            "This engine does not fit its devices",
            [
                f"{kept * groups:,} checkpoints take {amount(kept * one.checkpoint)} of a device, {amount(left)} are left for them"
            ],
            f"Take checkpoints={left // one.checkpoint * groups:,} or fewer.",
        )
    if _on_cpu(steps):
        fitting = min(fitting, CPU_SEQUENCES * local * least)
        kept = kept if checkpoints is not None else min(kept, CPU_CHECKPOINTS * local)
    return EngineLimits(
        slots=local * groups,
        pages=(fitting if pages is None else wanted) * groups,
        checkpoints=kept * groups,
        queue=queue,
        page=page,
        chunk=chunk,
        spacing=spacing(one, page, chunk),
    )


def fitting_page(steps: Steps) -> int:
    """The largest page of at most 64 tokens that divides a sequence and that the kernels can read; the least they can otherwise."""
    unit = page_unit(steps)
    return next((size for size in range(LARGEST_PAGE, 0, -1) if steps.capacity % size == 0 and size % unit == 0), unit)


def spacing(one: Costs, page: int, chunk: int) -> int:
    """Tokens between checkpoints of a long prompt: as many as cost one checkpoint's memory, and not less than a chunk.

    Below that, checkpoints would take more memory than the pages that they make reusable, or split every prefill call.
    """
    equal = -(-one.checkpoint * page // one.page)
    return -(-max(equal, chunk, page) // page) * page


def memory_of(steps: Steps) -> int:
    """Bytes of one device of a model: what its allocator may take, or of a CPU its part of half the machine's memory."""
    assert isinstance(steps.mesh, Mesh)  # arrays lie on devices
    told = [
        device.memory_stats() for device in np.ravel(steps.mesh.devices) if device.process_index == jax.process_index()
    ]
    if all(stats and "bytes_limit" in stats for stats in told):
        return min(stats["bytes_limit"] for stats in told)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // len(told)


def _on_cpu(steps: Steps) -> bool:
    return platform_of_mesh(steps.mesh) == "cpu"


def _bytes(steps: Steps, specs: Any) -> int:
    return sum(bytes_of(spec, steps.layout).per_device for spec in specs)


def _narrowed(steps: Steps) -> Steps | None:
    """The same with latent rows of one byte; None where they are, or where the exact mode forbids them."""
    if steps.precision.latent == LATENTS["fp8"] or steps.precision.exact:
        return None
    return replace(steps, precision=replace(steps.precision, latent=LATENTS["fp8"]))


def _refusal(
    steps: Steps, one: Costs, narrow: Costs | None, slots: int, pages: int, page: int, total: int, share: float
) -> LimitsError:
    """Says what is needed, and the first single change that would be enough, those that cost least first."""
    need, usable, groups = one.need(slots, pages), math.floor(total * share), steps.parallel.size("batch")
    parts = (
        f"weights {amount(one.weights)}, a prefill call {amount(one.scratch)}, {slots * groups} slots "
        f"{amount(slots * one.slot)}, {pages * groups:,} pages {amount(pages * one.page)}"
    )
    said = f"a device needs {amount(need)} ({parts}); it has {amount(usable)}, {share:.0%} of {amount(total)}"
    change = next(_changes(steps, one, narrow, slots, pages, page, total, share), None)
    hint = (
        f"Smallest change that would fit: {change}."
        if change
        else "No single change is enough; take more devices (kimi-jax plan)."
    )
    return LimitsError("This engine does not fit its devices", [said], hint)


def _changes(
    steps: Steps, one: Costs, narrow: Costs | None, slots: int, pages: int, page: int, total: int, share: float
) -> Iterator[str]:
    groups, usable = steps.parallel.size("batch"), math.floor(total * share)
    enough = math.ceil(one.need(slots, pages) / total * 100) / 100
    if enough <= MOST_SHARE:
        yield f"{enough:.0%} of the memory instead of {share:.0%}"
    fewer = (usable - one.need(0, pages)) // one.slot
    if fewer >= 1:
        yield f"{fewer * groups} slots instead of {slots * groups}"
    if narrow is not None and narrow.need(slots, pages) <= usable:
        yield "latent rows of one byte (kv_dtype fp8)"
    shorter = (usable - one.need(slots, 0)) // one.page
    if shorter >= 1:
        yield f"sequences of {shorter * page:,} tokens instead of {steps.capacity:,} (max_seq_len)"
