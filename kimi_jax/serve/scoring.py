"""Log-probabilities of the tokens of a prompt, which evaluations compare: the model is run over them, nothing is drawn."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kimi_jax.engine.buckets import widths
from kimi_jax.engine.request import Event
from kimi_jax.engine.runner import Runner

UNSCORED = math.nan
"""The log-probability of a first token: nothing comes before it."""


class Scorer:
    """Scores prompts with a runner of its own programs and cache, beside those of the engine.

    Args:
      runner: of the loaded model; to be called by the engine's thread only.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def warm(self) -> None:
        """Compiles the programs of every width; no later prompt compiles anything."""
        every = widths(self._runner.chunk)
        for width in (*every, every[0]):  # the first prompt makes a cache, every other one clears it
            for _ in self._runner.scored([0] * min(width, self._runner.capacity)):
                pass

    def scores(self, ids: Sequence[int], top: int) -> Iterator[list[Event]]:
        """The tokens of a prompt as if they had been drawn, one list for each call of the model.

        Args:
          ids: the prompt.
          top: alternatives to report with each.
        """
        yield [Event(0, ids[0], UNSCORED)]
        place = 1
        for logits in self._runner.scored(ids):
            targets = ids[place : place + len(logits)]
            yield [_event(row, target, top) for row, target in zip(logits, targets, strict=False)]
            place += len(targets)


def _event(logits: np.ndarray[Any, Any], target: int, top: int) -> Event:
    largest = logits.max()
    scores = logits - (largest + math.log(np.exp(logits - largest, dtype=np.float64).sum()))
    best = np.argpartition(-scores, top)[:top] if top else np.zeros(0, int)
    ordered = best[np.argsort(-scores[best], kind="stable")]
    return Event(0, target, float(scores[target]), None, tuple((int(i), float(scores[i])) for i in ordered))
