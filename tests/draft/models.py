"""k3-tiny with each of its tiny drafts, once per process."""

from functools import cache

import numpy as np

from kimi_jax.draft.attach import DraftOptions, attach
from kimi_jax.draft.steps import DraftedSteps
from kimi_jax.engine.drafted import DraftedRunner
from kimi_jax.loop import RUNNING, Limits, Rows
from kimi_jax.ops.sample.api import Sampling
from tests.draft.golden import DRAFTS
from tests.parity.models import tiny

WIDTH = 64
"""Prompt tokens of a call here: the longest golden prompt fits, and every prompt shares one program."""


@cache
def drafted(name: str, layout: str = "single", rule: str = "block") -> tuple[DraftedSteps, dict]:
    """Programs and parameters of the target with one draft, in float32."""
    runner = tiny(layout).runner
    return attach(runner.steps, runner.params, DraftOptions(DRAFTS / name, rule=rule))


def runner(name: str, layout: str = "single", rule: str = "block") -> DraftedRunner:
    steps, params = drafted(name, layout, rule)
    return DraftedRunner(steps, params, np.ones(steps.config.vocab, bool), WIDTH)


def prefilled(steps: DraftedSteps, params: dict, prompts: list[list[int]]):
    """A cache that has read some prompts, and their lengths."""
    ids = np.zeros((len(prompts), WIDTH), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    new = np.array([len(prompt) for prompt in prompts], np.int32)
    cache = steps.extend(params, steps.new_cache(len(prompts)), ids, np.zeros_like(new), new)
    return cache, new


def rows_at(token, position, budget=1000) -> Rows:
    token, position = np.asarray(token, np.int32), np.asarray(position, np.int32)
    return Rows(token, position, np.full_like(token, budget), np.full_like(token, RUNNING))


def arguments(steps: DraftedSteps, rows: int, temperature=0.0) -> tuple[Sampling, Limits]:
    zero = np.zeros(rows, np.int32)
    warm = np.broadcast_to(np.float32(temperature), (rows,))
    sampling = Sampling(warm, np.ones(rows, np.float32), zero, zero.astype(np.uint32))
    return sampling, Limits(np.ones(steps.config.vocab, bool), np.full((rows, 8), -1, np.int32))
