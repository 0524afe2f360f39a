"""Counts for Prometheus. A registry of its own for every server, so that two in one process do not mix."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kimi_jax.engine.engine import EngineStats
from kimi_jax.engine.request import DraftCounts
from kimi_jax.media.room import Room
from kimi_jax.media.rows_cache import RowsCache

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 3)

_GAUGES = {
    "queued": "requests that wait for a slot",
    "running": "requests that hold a slot",
    "slots": "slots",
    "pages": "pages of latent rows",
    "pages_used": "pages of running requests",
    "pages_kept": "pages kept for prefix hits only",
    "checkpoints": "recurrent checkpoints",
    "checkpoints_used": "recurrent checkpoints that hold a state",
}
_TOTALS = {
    "prompt_tokens": "tokens of admitted prompts, prefix hits included",
    "hit_tokens": "prompt tokens found in the prefix cache",
    "drawn_tokens": "ids drawn",
    "preemptions": "times that a request gave its slot back before its end",
    "turns": "turns of the engine that did something",
}


class Metrics:
    """What a server counts.

    Args:
      stats: the engine's counts of its last turn, None before the first.
    """

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(stats))
        self.responses = Counter(
            "kimi_jax_http_responses", "HTTP responses", ("path", "status"), registry=self._registry
        )
        self.finished = Counter("kimi_jax_answers", "finished answers by reason", ("reason",), registry=self._registry)
        self.images = Counter(
            "kimi_jax_images", "images of requests by what became of them", ("outcome",), registry=self._registry
        )
        self.first_token = self._seconds("time_to_first_token", "from the request to its first token", _SECONDS)
        self.per_token = self._seconds("time_per_output_token", "mean of the later tokens of a request", _TOKEN_SECONDS)
        self.request = self._seconds("request", "from the request to the end of its answer", _SECONDS)

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kimi_jax_{name}_seconds", what, buckets=buckets, registry=self._registry)

    def watch(self, kept: RowsCache, room: Room) -> None:
        """Tells of the memory of images too."""
        self._registry.register(_ImageCounts(kept, room))

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCounts(Collector):
    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, what in _GAUGES.items():
            yield GaugeMetricFamily(f"kimi_jax_{name}", what, value=getattr(stats, name))
        for name, what in _TOTALS.items():
            yield CounterMetricFamily(f"kimi_jax_{name}", what, value=getattr(stats, name))
        if stats.drafts is not None:
            yield from _draft_counts(stats.drafts)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _draft_counts(drafts: DraftCounts) -> Iterator[Metric]:
    kept = [sum(drafts.stayed[place:]) for place in range(len(drafts.stayed))]  # steps that kept at least so many
    steps, *by_position = kept
    yield CounterMetricFamily("kimi_jax_draft_steps", "steps of requests with drafts", value=steps)
    yield CounterMetricFamily("kimi_jax_drafted_tokens", "drafts that the model looked at", value=drafts.verified)
    yield CounterMetricFamily("kimi_jax_accepted_tokens", "drafts that were kept", value=sum(by_position))
    what = "drafts that were kept, by their place in the block"
    family = CounterMetricFamily("kimi_jax_accepted_tokens_by_position", what, labels=("position",))
    for position, value in enumerate(by_position, 1):
        family.add_metric((str(position),), value)
    yield family


class _ImageCounts(Collector):
    def __init__(self, kept: RowsCache, room: Room) -> None:
        self._kept, self._room = kept, room

    def collect(self) -> Iterator[Metric]:
        kept = self._kept
        yield CounterMetricFamily("kimi_jax_image_hits", "images whose rows were there", value=kept.hits)
        yield CounterMetricFamily("kimi_jax_image_misses", "images that the tower looked at", value=kept.misses)
        yield GaugeMetricFamily("kimi_jax_image_kept_bytes", "rows of images kept for later", value=kept.bytes)
        yield GaugeMetricFamily("kimi_jax_image_bytes", "pictures and rows in use or kept", value=self._room.bytes)

    def describe(self) -> Iterator[Metric]:
        return iter(())
