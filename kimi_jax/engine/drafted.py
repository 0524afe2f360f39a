"""A runner whose steps speculate: the same batches, whose events also tell what became of the drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from kimi_jax.draft.speculate import DraftedCache
from kimi_jax.draft.steps import PREFIX, DraftedSteps
from kimi_jax.engine.request import DraftCounts, Event, Request
from kimi_jax.engine.runner import Batch, Runner


class DraftedRunner(Runner):
    """Runs batches of a model with a draft (``draft.steps.DraftedSteps``)."""

    def without_draft(self) -> Runner:
        """The target alone, over the same arrays."""
        steps = self.steps
        assert isinstance(steps, DraftedSteps)
        params = {name: array for name, array in self.params.items() if not name.startswith(PREFIX)}
        return Runner(steps.without_draft(), params, self.allowed, self.chunk)

    def open(self, requests: Sequence[Request]) -> "DraftedBatch":
        return DraftedBatch(self, list(requests))


class DraftedBatch(Batch):
    """Some requests under way, several tokens a step."""

    def news(self) -> Iterator[Event]:
        """What the last call drew, with the counts of its row so far."""
        cache = self._cache
        assert isinstance(cache, DraftedCache)
        stayed, verified = jax.device_get(cache.tally)
        for event in super().news():
            row = event.request
            yield replace(event, drafts=DraftCounts(int(verified[row]), tuple(stayed[row].tolist())))
