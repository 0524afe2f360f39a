"""Ranks the shipped layouts for a goal and says why the first one wins."""

from dataclasses import dataclass
from typing import Literal, get_args

from kimi_jax.placement.files import shipped_names
from kimi_jax.placement.layout import LayoutError, load_layout, validate
from kimi_jax.planning.ask import Ask, changed
from kimi_jax.planning.bounds import Call, decode
from kimi_jax.planning.fit import longest_context, sequences_that_fit, usable_bytes
from kimi_jax.planning.sizes import sizes
from kimi_jax.problems import ProblemsError

Goal = Literal["latency", "throughput", "longest-context"]
GOALS: tuple[Goal, ...] = get_args(Goal)

WORTH_NAMING = 3
"""Differences that an explanation names, largest first."""


class SearchError(ProblemsError):
    """A goal that is not known, or that no shipped layout can serve."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
      layout: its name.
      value: what the goal ranks by: seconds of a step, tokens a second, tokens of a sequence.
      batch: sequences of the step that was looked at.
      device_bytes: weights and state on one device at that batch.
      call: the decode step, at the end of the context.
    """

    layout: str
    value: float
    batch: int
    device_bytes: int
    call: Call


@dataclass(frozen=True)
class Search:
    """The shipped layouts in order.

    Attributes:
      goal: what they are ranked for.
      ranked: those that fit, best first.
      refused: (layout, why not).
      why: what sets the first apart from the second, one line each.
    """

    goal: Goal
    ranked: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    why: tuple[str, ...]


def search(ask: Ask, goal: str) -> Search:
    """Ranks every shipped layout for a goal; the ask's own layout plays no part.

    Args:
      goal: ``latency``: modelled time of a decode step of the ask's batch at the end of its context. ``throughput``:
        tokens a second of the whole mesh with as many sequences as fit. ``longest-context``: tokens that each sequence
        of the batch could hold.

    Raises:
      SearchError: no such goal, or no shipped layout fits.
    """
    if goal not in GOALS:
        raise SearchError(f"No goal is called {goal!r}", [f"known: {', '.join(GOALS)}"])
    found, refused = [], []
    for name in shipped_names("layouts"):
        candidate = _candidate(changed(ask, layout=load_layout(name)), goal)
        (refused if isinstance(candidate, str) else found).append((name, candidate))
    if not found:
        reasons = [f"{name}: {why}" for name, why in refused]
        raise SearchError(f"No shipped layout serves {ask.config.name} on {ask.device.name}", reasons)
    sign = 1 if goal == "latency" else -1
    ranked = sorted((candidate for _, candidate in found), key=lambda each: sign * each.value)
    return Search(goal, tuple(ranked), tuple(refused), tuple(_why(goal, ranked)))  # pyright: ignore[reportArgumentType]


def _candidate(ask: Ask, goal: str) -> Candidate | str:
    """The layout of an ask, or why it is out."""
    name = ask.layout.name
    try:
        validate(ask.placed, ask.arrays, ask.config.name)
    except LayoutError as error:
        return error.problems[0]
    usable = usable_bytes(ask)
    if usable is None:
        return f"the memory of {ask.device.name} is unknown"
    if goal == "throughput":
        batch = sequences_that_fit(ask) or 0
        if batch == 0:
            return _too_large(ask, usable)
        ask = changed(ask, batch=batch)
    need = sizes(ask).device_bytes
    if need > usable:
        return _too_large(ask, usable)
    call = decode(ask, ask.context - 1)
    if goal == "longest-context":
        return Candidate(name, longest_context(ask) or 0, ask.rows, need, call)
    if call.bound.modelled is None:
        return f"the bandwidth of {ask.device.name} is unknown"
    value = call.bound.modelled if goal == "latency" else ask.rows / call.bound.modelled
    return Candidate(name, value, ask.rows, need, call)


def _too_large(ask: Ask, usable: int) -> str:
    need = sizes(ask).device_bytes
    return f"needs {need / 2**30:.1f} GiB on a device, {usable / 2**30:.1f} may be used"


def _why(goal: str, ranked: list[Candidate]) -> list[str]:
    """The winner beside the runner-up."""
    first = ranked[0]
    if len(ranked) == 1:
        return [f"{first.layout} is the only shipped layout that fits"]
    second = ranked[1]
    lines = [_lead(goal, first, second)]
    if goal == "longest-context":
        left = second.device_bytes - first.device_bytes
        held = "fewer" if left > 0 else "more"
        return [*lines, f"it holds {abs(left) / 1e9:.3f} GB {held} on a device for the same tokens"]
    if first.batch != second.batch:
        lines.append(f"{first.layout} holds {first.batch} sequences at once, {second.layout} {second.batch}")
    unit = "step" if goal == "latency" else "token"
    deltas = _seconds_by_part(first, second, per_token=goal == "throughput")
    for part, delta in sorted(deltas.items(), key=lambda item: -abs(item[1]))[:WORTH_NAMING]:
        if abs(delta) >= 1e-6:
            lines.append(f"{part}: {abs(delta) * 1e3:.3f} ms {'less' if delta < 0 else 'more'} a {unit}")
    return lines


def _lead(goal: str, first: Candidate, second: Candidate) -> str:
    if goal == "latency":
        return f"{first.layout} takes {first.value * 1e3:.3f} ms a step, {second.layout} {second.value * 1e3:.3f}"
    if goal == "throughput":
        return f"{first.layout} gives {first.value:.1f} tokens a second, {second.layout} {second.value:.1f}"
    return f"{first.layout} could hold {first.value:,.0f} tokens a sequence, {second.layout} {second.value:,.0f}"


def _seconds_by_part(first: Candidate, second: Candidate, *, per_token: bool) -> dict[str, float]:
    """Seconds of the first step less those of the second, per part and for the collectives."""
    deltas: dict[str, float] = {}
    for candidate, sign in ((first, 1.0), (second, -1.0)):
        bound, weight = candidate.call.bound, sign / candidate.batch if per_token else sign
        times = {part.work.part: part.seconds for part in bound.parts} | {"collectives": bound.exchange_seconds}
        for part, seconds in times.items():
            deltas[part] = deltas.get(part, 0.0) + weight * (seconds or 0.0)
    return deltas
