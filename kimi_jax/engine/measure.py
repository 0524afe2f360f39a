"""Timed runs of the engine's own steps: prefill of random ids, and decoding fed with a random stream.

Decoding is not fed its own output: a random model repeats itself, which would read the same experts again and again. Every step's
choice reaches the host before the next one starts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kimi_jax.engine.request import DraftCounts, Request, check_ids
from kimi_jax.engine.runner import Runner


@dataclass(frozen=True)
class Timing:
    """Seconds of one measured unit.

    Attributes:
      first: of the first run, compilation included.
      runs: of the later runs.
      tokens: tokens of one run, over all rows.
    """

    first: float
    runs: tuple[float, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return median(self.runs)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def time_prefill(runner: Runner, tokens: int, repeats: int, seed: int = 5) -> Timing:
    """One prompt of random ids from an empty state to its first drawn id."""
    ids = np.random.default_rng(seed).integers(4, runner.steps.config.vocab, tokens).tolist()

    def once() -> float:
        began = time.perf_counter()
        for _ in runner.run([Request(ids, max_tokens=1)]):
            pass
        return time.perf_counter() - began

    first = once()
    return Timing(first, tuple(once() for _ in range(repeats)), tokens)


def time_decode(runner: Runner, rows: int, context: int, steps: int, repeats: int, seed: int = 5) -> Timing:
    """``steps`` decode steps of ``rows`` sequences that hold ``context`` tokens each; the unit is all of the steps.

    Raises:
      RequestError: a sequence cannot hold that many tokens.
    """
    # the fed stream counts too: a full cache would end the rows, and their steps would cost nothing
    check_ids([0] * (context + steps + 2), runner.steps.config.vocab, runner.capacity)
    random = np.random.default_rng(seed)
    prompts = random.integers(4, runner.steps.config.vocab, (rows, context)).tolist()
    stream = random.integers(4, runner.steps.config.vocab, (steps, rows)).astype(np.int32)
    requests = [Request(prompt, max_tokens=steps + 2) for prompt in prompts]

    def once() -> float:
        session = runner.open(requests)
        list(session.news())  # waits for the prefill, which is dispatched only
        began = time.perf_counter()
        for tokens in stream:
            session.feed(tokens)
        seconds = time.perf_counter() - began
        session.close()
        return seconds

    first = once()
    return Timing(first, tuple(once() for _ in range(repeats)), steps * rows)


def time_answers(
    runner: Runner, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, repeats: int
) -> tuple[Timing, list[list[int]], DraftCounts | None]:
    """Answers of ``tokens`` ids each, all at once, prefill not counted; nothing ends one early.

    Unlike :func:`time_decode` the model goes on from what it has drawn: drafts are about that.

    Returns:
      The times, the ids of the last run, and what became of its drafts.
    """
    requests = [Request(list(prompt), tokens, temperature, seed=place) for place, prompt in enumerate(prompts)]
    ids: list[list[int]] = []
    counts: dict[int, DraftCounts] = {}

    def once() -> float:
        ids[:] = [[] for _ in requests]
        session, began = runner.open(requests), 0.0
        try:
            while session.open_rows:
                for event in session.news():
                    ids[event.request] += [] if event.token is None else [event.token]
                    if event.drafts is not None:
                        counts[event.request] = event.drafts
                began = began or time.perf_counter()
                if session.open_rows:
                    session.decode()
        finally:
            session.close()
        return time.perf_counter() - began

    first = once()
    timing = Timing(first, tuple(once() for _ in range(repeats)), sum(map(len, ids)) - len(ids))
    return timing, list(ids), _joined(list(counts.values()))


def _joined(counts: list[DraftCounts]) -> DraftCounts | None:
    if not counts:
        return None
    return DraftCounts(sum(c.verified for c in counts), tuple(map(sum, zip(*(c.stayed for c in counts), strict=True))))
