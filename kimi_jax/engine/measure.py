"""Timed runs of the engine's own steps: prefill of random ids, and decoding fed with a random stream.

Decoding is not fed its own output: a random model repeats itself, which would read the same experts again and again. Every step's
choice reaches the host before the next one starts.
"""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from kimi_jax.engine.request import Request, check_ids
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
