"""The least time of one step on one device, and a modelled time, from what the step must move, multiply and exchange.

Knows abstract arrays, layouts and devices. Each part of a step is bounded by memory or by arithmetic; collectives add
their latency and their bytes; kernel launches add theirs. What the device file does not know is left out and named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.device import Device
from kimi_jax.placement.layout import Layout

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]

PEAKS = {"uint8": "bf16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8"}
"""Dtype of a weight -> the peak that its products run at; packed fp4 weights meet bfloat16 activations."""


@dataclass(frozen=True)
class Work:
    """One part of a step on one device, the average device where they differ.

    Attributes:
      part: its name.
      bytes: read from and written to memory.
      flops: (peak's dtype, operations) pairs.
      launches: kernels, if nothing is fused.
      spread: work of the busiest device over that of the average one; a step waits for the busiest.
      on_chip: the bytes may stay in caches, so only the modelled time counts them.
    """

    part: str
    bytes: float
    flops: tuple[tuple[str, float], ...] = ()
    launches: int = 0
    spread: float = 1.0
    on_chip: bool = False


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as often as it occurs.

    Attributes:
      part: what it exchanges.
      kind: what it does.
      count: how often a step runs it.
      bytes: the whole array that is reduced or gathered, once.
      participants: devices that take part.
    """

    part: str
    kind: CollectiveKind
    count: int
    bytes: float
    participants: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step, by the best algorithm."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.count * self.bytes * rounds * (self.participants - 1) / self.participants


@dataclass(frozen=True)
class Timed:
    """A part with its times in seconds; None where the device file lacks a number."""

    work: Work
    memory: float | None
    arithmetic: float | None

    @property
    def seconds(self) -> float | None:
        """The part alone, on the busiest device."""
        known = [time for time in (self.memory, self.arithmetic) if time is not None]
        return max(known) * self.work.spread if self.memory is not None else None


@dataclass(frozen=True)
class Exchange:
    """A collective with its time in seconds; None where the device file lacks its latency."""

    collective: Collective
    seconds: float | None


@dataclass(frozen=True)
class Bound:
    """What one step costs on one device.

    Attributes:
      parts: each part and its times.
      exchanges: each collective and its time.
      bytes: that must move; what may stay on chip is not counted.
      flops: (peak's dtype, operations) pairs.
      lower: no step can be faster: all bytes, operations and sent bytes, perfectly overlapped. None when unknown.
      by: what the lower bound is made of.
      launches: kernels, if nothing is fused.
      launch_seconds: their time, None when unknown.
      unknown: numbers of the device file that are missing.
    """

    parts: tuple[Timed, ...]
    exchanges: tuple[Exchange, ...]
    bytes: float
    flops: tuple[tuple[str, float], ...]
    lower: float | None
    by: Literal["memory", "arithmetic", "links"] | None
    launches: int
    launch_seconds: float | None
    unknown: tuple[str, ...]

    @property
    def collectives(self) -> int:
        """How many a step runs."""
        return sum(exchange.collective.count for exchange in self.exchanges)

    @property
    def modelled(self) -> float | None:
        """Seconds of the parts, the collectives and the launches one after the other.

        What is unknown of links and launches counts nothing (``unknown`` names it); None where memory is unknown.
        """
        if self.part_seconds is None:
            return None
        known = [exchange.seconds for exchange in self.exchanges if exchange.seconds is not None]
        return math.fsum([self.part_seconds, *known, self.launch_seconds or 0.0])

    @property
    def part_seconds(self) -> float | None:
        """Time of all parts one after the other, None when unknown."""
        times = [part.seconds for part in self.parts]
        return None if any(time is None for time in times) else math.fsum(time or 0.0 for time in times)

    @property
    def exchange_seconds(self) -> float | None:
        """Time of all collectives, None when unknown."""
        times = [exchange.seconds for exchange in self.exchanges]
        return None if any(time is None for time in times) else math.fsum(time or 0.0 for time in times)


def bound(work: Sequence[Work], collectives: Sequence[Collective], device: Device) -> Bound:
    """Holds the parts of a step against a device."""
    parts = tuple(_timed(part, device) for part in work)
    exchanges = tuple(Exchange(each, _exchange_seconds(each, device)) for each in collectives if each.participants > 1)
    moved = math.fsum(part.bytes for part in work if not part.on_chip)
    flops = total_flops(work)
    launches = sum(part.launches for part in work)
    launch_seconds = None if device.launch_latency is None else launches * device.launch_latency
    lower, by = _lower(moved, flops, exchanges, device)
    missing = [key for key in ("hbm_bandwidth",) if getattr(device, key) is None]
    missing += [f"peak.{dtype}" for dtype, _ in flops if device.peak(dtype) is None]
    if exchanges:
        missing += [key for key in ("link_bandwidth", "link_latency") if getattr(device, key) is None]
    if launches and device.launch_latency is None:
        missing.append("launch_latency")
    return Bound(parts, exchanges, moved, flops, lower, by, launches, launch_seconds, tuple(missing))


def total_flops(work: Iterable[Work]) -> tuple[tuple[str, float], ...]:
    """Operations of several parts by dtype."""
    sums: dict[str, float] = {}
    for part in work:
        for dtype, count in part.flops:
            sums[dtype] = sums.get(dtype, 0.0) + count
    return tuple((dtype, count) for dtype, count in sums.items() if count)


def product_flops(weight: ArraySpec, layout: Layout, tokens: float) -> tuple[str, float]:
    """Operations of ``tokens`` rows times one device's share of a weight, and the peak they run at."""
    return PEAKS[weight.dtype.name], 2.0 * math.prod(layout.local_shape(weight)) * tokens


def expected_busiest(drawn: float, parts: int, each: int) -> float:
    """Expected items of the busiest of ``parts`` shares of ``each`` items over those of the average share.

    Every item is drawn by itself with the chance that makes ``drawn`` of all of them.
    """
    if parts == 1 or drawn <= 0:
        return 1.0
    chance = min(drawn / (parts * each), 1.0)
    below, expected = 0.0, 0.0
    for count in range(each):
        below = min(1.0, below + _binomial(each, count, chance))
        expected += 1.0 - below**parts  # chance that some share has more than `count`
    return max(expected / (drawn / parts), 1.0)


def _binomial(total: int, count: int, chance: float) -> float:
    if chance >= 1.0:
        return float(count == total)
    choices = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    return math.exp(choices + count * math.log(chance) + (total - count) * math.log1p(-chance))


def _timed(part: Work, device: Device) -> Timed:
    memory = None if device.hbm_bandwidth is None else part.bytes / device.hbm_bandwidth
    return Timed(part, memory, _arithmetic(part.flops, device))


def _arithmetic(flops: Iterable[tuple[str, float]], device: Device) -> float | None:
    """Seconds of operations of several dtypes one after the other; None when a peak is unknown."""
    times = []
    for dtype, count in flops:
        peak = device.peak(dtype)
        if peak is None:
            return None
        times.append(count / peak)
    return math.fsum(times)


def _exchange_seconds(collective: Collective, device: Device) -> float | None:
    if device.link_latency is None or device.link_bandwidth is None:
        return None
    return collective.count * device.link_latency + collective.sent / device.link_bandwidth


def _lower(
    moved: float, flops: tuple[tuple[str, float], ...], exchanges: tuple[Exchange, ...], device: Device
) -> tuple[float | None, Literal["memory", "arithmetic", "links"] | None]:
    arithmetic = _arithmetic(flops, device)
    if device.hbm_bandwidth is None or arithmetic is None:
        return None, None
    sent = math.fsum(exchange.collective.sent for exchange in exchanges)
    links = sent / device.link_bandwidth if device.link_bandwidth else 0.0
    memory = moved / device.hbm_bandwidth
    slowest = max(memory, arithmetic, links)
    return slowest, "memory" if slowest == memory else "arithmetic" if slowest == arithmetic else "links"
