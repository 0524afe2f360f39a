"""A finished plan: everything that was worked out, and the forms in which it is shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.placement.layout import load_layout
from kimi_jax.planning.ask import Ask, changed
from kimi_jax.planning.bounds import Call
from kimi_jax.planning.fit import Fit
from kimi_jax.planning.search import Search
from kimi_jax.planning.sizes import Parameters, Sizes, sizes
from kimi_jax.planning.speculation import Speculation
from kimi_jax.planning.trade import Trade


@dataclass(frozen=True)
class Plan:
    """What a configuration needs on a layout of a device.

    Attributes:
      ask: what was planned.
      sizes: bytes of weights and running state.
      parameters: how many numbers the model has.
      fit: whether it fits, and what would.
      calls: decode steps and prefill chunks with their bounds.
      trade: whether splitting the replicated projections pays, where the layout can.
      ranking: the shipped layouts for a goal, where one was given.
      speculation: every length of the draft's block, where there is a draft and a table of its acceptance.
    """

    ask: Ask
    sizes: Sizes
    parameters: Parameters
    fit: Fit
    calls: tuple[Call, ...]
    trade: Trade | None = None
    ranking: Search | None = None
    speculation: Speculation | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on one device, padding included: exactly what is placed there."""
        return self.sizes.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches on one device."""
        return self.sizes.cache_bytes

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values; the keys are documented in ``planning/report.py`` and only ever added to."""
        from kimi_jax.planning.report import as_json

        return as_json(self)

    def __str__(self) -> str:
        from kimi_jax.planning.table import render

        return render(self)

    def figure(self, path: str | Path) -> Path:
        """Draws what fills one device as a stacked bar, beside the other layouts of a search. Needs matplotlib."""
        from kimi_jax.planning.figure import draw

        others = [] if self.ranking is None else [candidate.layout for candidate in self.ranking.ranked]
        asks = [
            self.ask,
            *(changed(self.ask, layout=load_layout(name)) for name in others if name != self.ask.layout.name),
        ]
        return draw([(ask, sizes(ask)) for ask in asks], Path(path))
