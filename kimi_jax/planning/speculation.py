"""How long a drafted block should be: steps of every length held against what they are expected to yield."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kimi_jax.cache import KdaCache
from kimi_jax.placement.roofline import Bound, bound
from kimi_jax.planning.ask import Ask
from kimi_jax.planning.drafted_step import drafted_step
from kimi_jax.planning.step import record_bytes, touched_experts

LAUNCH_SECONDS = (0.0, 1e-6, 2e-6, 3.9e-6)
"""What a launch may cost where the device file knows no figure; the last is of another chip (sharding/devices/mi355x.toml)."""


@dataclass(frozen=True)
class Length:
    """Steps of one length.

    Attributes:
      drafts: drafted tokens of a sequence; 0 is plain decoding.
      tokens: expected to stay of a step, the one after the last kept draft included.
      experts: distinct routed experts of a layer that the tokens of one replica are expected to touch.
      bound: what a step costs on one device.
      speeds: new tokens of the whole mesh per second, for each cost of a launch; None where a time is unknown.
    """

    drafts: int
    tokens: float
    experts: float
    bound: Bound
    speeds: tuple[float | None, ...]


@dataclass(frozen=True)
class Speculation:
    """Every length of a draft, beside plain decoding.

    Attributes:
      acceptance: chance of each drafted place to be kept, given that those before it are.
      context: tokens held of each sequence.
      launch_seconds: costs of a launch that ``speeds`` are for.
      lengths: plain decoding first.
      record_bytes: what a block of the longest length keeps until its verdict, on one device.
      state_bytes: recurrent states and windows on one device, which are written once a step however many drafts there are.
    """

    acceptance: tuple[float, ...]
    context: int
    launch_seconds: tuple[float, ...]
    lengths: tuple[Length, ...]
    record_bytes: float
    state_bytes: int

    def best(self, at: int = 0) -> Length | None:
        """The fastest length for the cost of a launch at this place; None where nothing is known."""
        known = [length for length in self.lengths if length.speeds[at] is not None]
        return max(known, key=lambda length: length.speeds[at] or 0.0) if known else None


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Ids that a step yields: one, and every draft that is kept together with all before it (DSpark notes, section 13)."""
    return 1.0 + math.fsum(math.prod(acceptance[:place]) for place in range(1, len(acceptance) + 1))


def acceptance_problems(acceptance: Sequence[float], drafts: int) -> list[str]:
    """Why a table of chances cannot be used; empty where it can."""
    problems = [
        f"acceptance {chance} is no chance; give numbers from 0 to 1" for chance in acceptance if not 0 <= chance <= 1
    ]
    if not 1 <= len(acceptance) <= drafts:
        problems.append(
            f"acceptance has {len(acceptance)} places; the draft has {drafts}: give one for all, or 1 to {drafts}"
        )
    return problems


def speculate(ask: Ask, acceptance: Sequence[float], context: int | None = None) -> Speculation:
    """All lengths of the ask's draft.

    Args:
      acceptance: one chance for every place, or one a place; the lengths end with the last.
      context: tokens held before the step; the end of the context where omitted.
    """
    assert ask.draft is not None
    chances = tuple(acceptance) * ask.draft.block if len(acceptance) == 1 else tuple(acceptance)
    context = ask.context - 1 - len(chances) if context is None else context
    costs = LAUNCH_SECONDS if ask.device.launch_latency is None else (ask.device.launch_latency,)
    lengths = tuple(_length(ask, chances[:drafts], max(context, 0), costs) for drafts in range(len(chances) + 1))
    recurrent = [entry for entry in ask.cache if isinstance(entry, KdaCache)]
    rows, placed = ask.rows / ask.placed.parts("batch"), ask.placed
    records = rows * (len(chances) + 1) * math.fsum(record_bytes(entry, placed) for entry in recurrent)
    states = sum(placed.local_bytes(entry.state) + placed.local_bytes(entry.conv) for entry in recurrent)
    return Speculation(chances, max(context, 0), costs, lengths, records, states)


def _length(ask: Ask, chances: tuple[float, ...], context: int, costs: Sequence[float]) -> Length:
    drafts = len(chances)
    done, tokens = drafted_step(ask, drafts, context), expected_tokens(chances)
    experts = touched_experts(ask.config, ask.rows * (drafts + 1) / ask.layout.parts("batch"))
    speeds = []
    for cost in costs:
        seconds = bound(done.work, done.collectives, replace(ask.device, launch_latency=cost)).modelled
        speeds.append(None if not seconds else ask.rows * tokens / seconds)
    return Length(drafts, tokens, experts, bound(done.work, done.collectives, ask.device), tuple(speeds))
