"""A plan as text: bytes, the answer, and the bounds with their parts."""

from collections.abc import Iterator, Sequence

from kimi_jax.placement.bytes import Bytes, total
from kimi_jax.planning.ask import Ask
from kimi_jax.planning.bounds import Call
from kimi_jax.planning.fit import Fit
from kimi_jax.planning.notes import notes
from kimi_jax.planning.parts import LABELS
from kimi_jax.planning.record import Plan
from kimi_jax.planning.report import GB, GIB, counted
from kimi_jax.planning.search import Search
from kimi_jax.planning.sizes import Parameters, Sizes
from kimi_jax.planning.speculation import Speculation

Unit = tuple[str, int]
SHOWN_CHANGES = 6
"""Changes that are listed one by one when nothing smaller fits; --json has all."""


def render(plan: Plan) -> str:
    """The whole text: GB where the weights are that large, MB for the small models of tests."""
    ask, calls = plan.ask, plan.calls
    unit = ("GB", GB) if total(plan.sizes.weights).whole >= GB else ("MB", 10**6)
    blocks = [
        _head(ask, plan.parameters),
        _bytes(ask, plan.sizes, plan.fit, unit),
        _answer(ask, plan.fit),
        _calls(calls, unit),
        _parts(calls, unit),
        _exchanges(calls),
    ]
    if plan.speculation is not None:
        blocks.append(_speculation(plan.speculation, unit))
    if plan.ranking is not None:
        blocks.append(_ranking(plan.ranking))
    blocks.append(f"note: {line}" for line in notes(plan))
    return "\n\n".join(filter(None, ("\n".join(block) for block in blocks)))


def _head(ask: Ask, parameters: Parameters) -> Iterator[str]:
    layout = ask.placed
    count = "1 sequence" if ask.rows == 1 else f"{ask.rows} sequences"
    yield f"{ask.config.name} on {layout.name}: {layout.devices} x {ask.device.name}, {count} of {ask.length:,} tokens"
    if layout.description:
        yield layout.description
    yield (
        f"{parameters.total:,} parameters, {parameters.active / 1e9:.2f} B read per text token "
        f"({parameters.active_without_head / 1e9:.2f} B without the output head)"
    )


def _bytes(ask: Ask, found: Sizes, fit: Fit, unit: Unit) -> Iterator[str]:
    yield f"{f'{unit[0]} = {unit[1]:,} bytes':36}{'whole':>12}{'one device':>12}"
    weights = counted(ask, found)
    note = " (vision in whole only)" if ask.vision == "off" and ask.config.vision is not None else ""
    for row, size in weights.items():
        yield _row(LABELS[row] + (note if row == "other" else ""), size, unit)
    yield _row("weights", total(weights), unit, f"  {found.weight_bytes / GIB:.3f} GiB")
    for row, size in found.state.items():
        yield _row(LABELS[row], size, unit)
    yield _row("running state", total(found.state), unit, f"  {found.state_bytes / GIB:.3f} GiB")
    share = ""
    if fit.capacity is not None:
        rest = (fit.capacity - fit.need) / GIB
        share = f" of {fit.capacity / GIB:g}: {100 * fit.need / fit.capacity:.1f} %, "
        share += f"{abs(rest):.3f} GiB {'left' if rest >= 0 else 'too much'}"
    both = total(weights) + total(found.state)
    yield _row("together", both, unit, f"  {fit.need / GIB:.3f} GiB{share}")
    padding = total(found.weights).padding
    yield f"padding of cut groups: {padding:,} bytes on one device"


def _row(label: str, size: Bytes, unit: Unit, after: str = "") -> str:
    return f"{label:36}{size.whole / unit[1]:12.3f}{size.per_device / unit[1]:12.3f}{after}"


def _answer(ask: Ask, fit: Fit) -> Iterator[str]:
    if fit.capacity is None or fit.usable is None or fit.left is None:
        yield f"Fits: unknown, {ask.device.name} states no memory."
        return
    usable = f"{fit.usable / GIB:.3f} GiB ({ask.memory_fraction:g} of the memory)"
    if fit.fits:
        yield f"Fits: yes. {fit.left / GIB:.3f} GiB left of {usable}."
    else:
        yield f"Fits: no. {-fit.left / GIB:.3f} GiB too much for {usable}."
        yield from _changes(fit)
    limit = ask.config.max_positions
    longest = fit.longest_context or 0
    over = f" (the model holds {limit:,})" if longest > limit else ""
    yield f"Sequences of this context that fit at once: {fit.sequences}."
    yield f"Longest context for {ask.rows} at once: {longest:,} tokens{over}."


def _changes(fit: Fit) -> Iterator[str]:
    if fit.smallest is None:
        yield f"None of {len(fit.tried)} changes makes it fit."
    else:
        yield f"Smallest change that fits: {fit.smallest.change.what}: {fit.smallest.change.options}"
    yield f"Tried in this order ({len(fit.tried)}):"
    for tried in fit.tried[:SHOWN_CHANGES]:
        verdict = "fits" if tried.fits else "too large"
        yield f"  {tried.need / GIB:10.3f} GiB  {verdict:9}  {tried.change.what}"
    if len(fit.tried) > SHOWN_CHANGES:
        last = fit.tried[-1]
        yield f"  ... and {len(fit.tried) - SHOWN_CHANGES} more, the last {last.need / GIB:.3f} GiB: {last.change.what}"


def _calls(calls: Sequence[Call], unit: Unit) -> Iterator[str]:
    yield (
        f"{'call':34}{unit[0]:>9}{'lower ms':>10}{'by':>11}{'modelled':>10}{'tok/s':>9}"
        f"{'collectives':>13}{'launches':>10}{'experts':>9}"
    )
    for call in calls:
        bound = call.bound
        yield (
            f"{_name(call):34}{bound.bytes / unit[1]:9.3f}{_ms(bound.lower, 10)}{bound.by or 'unknown':>11}"
            f"{_ms(bound.modelled, 10)}{_number(call.tokens_per_second, 9)}{bound.collectives:13}{bound.launches:10}"
            f"{call.experts:9.1f}"
        )


def _parts(calls: Sequence[Call], unit: Unit) -> Iterator[str]:
    """Bytes and ms of each part, a pair of columns per call."""
    short = [f"{call.kind} @{call.context:,}" for call in calls]
    yield f"{f'{unit[0]} | ms, one device':22}" + "".join(f"{name:>22}" for name in short)
    names = dict.fromkeys(part.work.part for call in calls for part in call.bound.parts)
    for name in names:
        cells = []
        for call in calls:
            part = next((part for part in call.bound.parts if part.work.part == name), None)
            cells.append(" " * 22 if part is None else f"{part.work.bytes / unit[1]:11.3f} |{_ms(part.seconds, 9)}")
        yield f"{name:22}" + "".join(cells)
    yield f"{'collectives':22}" + "".join(f"{'':11} |{_ms(call.bound.exchange_seconds, 9)}" for call in calls)
    yield f"{'launches':22}" + "".join(f"{'':11} |{_ms(call.bound.launch_seconds, 9)}" for call in calls)


def _exchanges(calls: Sequence[Call]) -> Iterator[str]:
    """Collectives of the first call: one decode step."""
    found = calls[0].bound.exchanges
    if not found:
        return
    yield f"{'collectives of a decode step':30}{'kind':>16}{'count':>7}{'bytes':>9}{'among':>7}{'ms':>9}"
    for each in found:
        one = each.collective
        yield f"{one.part:30}{one.kind:>16}{one.count:7}{one.bytes:9.0f}{one.participants:7}{_ms(each.seconds, 9)}"


def _speculation(found: Speculation, unit: Unit) -> Iterator[str]:
    """Every length of a block, beside plain decoding."""
    costs = [f"at {cost * 1e6:g} us" for cost in found.launch_seconds]
    yield f"drafted tokens of a step, {found.context:,} held; tokens/s by the cost of a launch"
    yield (
        f"{'drafts':>6}{'stay':>8}{'experts':>9}{unit[0]:>9}{'lower ms':>10}{'modelled':>10}{'launches':>10}"
        + "".join(f"{cost:>12}" for cost in costs)
    )
    for each in found.lengths:
        bound = each.bound
        yield (
            f"{each.drafts:6}{each.tokens:8.3f}{each.experts:9.1f}{bound.bytes / unit[1]:9.3f}{_ms(bound.lower, 10)}"
            f"{_ms(bound.modelled, 10)}{bound.launches:10}" + "".join(_number(speed, 12) for speed in each.speeds)
        )
    best = [found.best(at) for at in range(len(costs))]
    yield "best: " + ", ".join(
        f"{each.drafts} drafts {cost}" for cost, each in zip(costs, best, strict=True) if each is not None
    )
    yield (
        f"records of a block {found.record_bytes / unit[1]:.3f} {unit[0]} on a device until its verdict; states and windows "
        f"{found.state_bytes / unit[1]:.3f} {unit[0]}, written once a step"
    )


def _ranking(ranking: Search) -> Iterator[str]:
    yield f"shipped layouts for {ranking.goal}:"
    for place, each in enumerate(ranking.ranked, 1):
        shown = {
            "latency": f"{each.value * 1e3:.3f} ms a step",
            "throughput": f"{each.value:.1f} tokens/s",
            "longest-context": f"{each.value:,.0f} tokens",
        }[ranking.goal]
        held = f"{each.batch} at once, {each.device_bytes / GIB:.3f} GiB on a device"
        yield f"{place:3} {each.layout:12}{shown:>24}   {held}"
    for name, why in ranking.refused:
        yield f"  - {name:12} {why}"
    yield from (f"why: {line}" for line in ranking.why)


def _name(call: Call) -> str:
    new = f"{call.rows} new" if call.kind == "decode" else f"{call.rows} x {call.tokens}"
    return f"{call.kind}, {new}, {call.context:,} cached"


def _ms(seconds: float | None, width: int) -> str:
    return f"{'unknown':>{width}}" if seconds is None else f"{seconds * 1e3:{width}.3f}"


def _number(value: float | None, width: int) -> str:
    return f"{'unknown':>{width}}" if value is None else f"{value:{width}.1f}"
