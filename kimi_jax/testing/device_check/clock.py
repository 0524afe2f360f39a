"""Time of one call, out of many on the device, with inputs that no cache still holds.

A program calls the case once for each of several copies of its inputs, again and again in a loop on the device, so that neither
the host nor a launch of the program counts. Copies in turn, together larger than the last cache, come from memory each time.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.ops.implementation import Impl
from kimi_jax.placement.compiler import compiler_options
from kimi_jax.testing.device_check.case import Case, Inputs

MOST_COPIES = 80
"""Calls in one program: more take long to compile."""

BOUND_BY_ARITHMETIC = 300
"""Operations a byte from which every device is limited by them, and caches do not matter."""

TARGET = 0.02
"""Seconds of a timed run, if calls take their least time."""

SLOW_BANDWIDTH, SLOW_PEAK, SHORTEST = 4e12, 5e14, 5e-6
"""Bytes and operations a second, and seconds of the shortest call: only to choose the loop's length."""

COPIED = 1 << 30
"""Bytes of the array whose copy is timed: larger than any cache."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
      runs: of each timed run, per call.
      copies: copies of the inputs that were used in turn.
      cold: whether a turn over all of them moves twice the last cache, so that bytes come from memory.
      calls: calls in a run.
    """

    runs: tuple[float, ...]
    copies: int
    cold: bool
    calls: int

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return median(self.runs)

    @property
    def spread(self) -> float:
        """Slowest less fastest run, as a part of the median."""
        return (max(self.runs) - min(self.runs)) / self.seconds


def copies_of(case: Case, last_cache: int) -> tuple[int, bool]:
    """How many copies a case is timed with, and whether they are too large for a cache of ``last_cache`` bytes."""
    wanted = 1 if case.flops > BOUND_BY_ARITHMETIC * case.bytes else math.ceil(2 * last_cache / case.bytes)
    copies = min(wanted, MOST_COPIES)
    return copies, copies * case.bytes >= 2 * last_cache


def time_case(case: Case, impl: Impl, platform: str, last_cache: int, repeats: int = 7) -> Timing:
    """Warms up once, compilation included, then times ``repeats`` runs."""
    copies, cold = copies_of(case, last_cache)
    made = [case.inputs(copy) for copy in range(copies)]
    shared = jax.device_put(case.share())
    own, carried = jax.device_put([inputs.own for inputs in made]), jax.device_put([inputs.carried for inputs in made])
    least = max(case.bytes / SLOW_BANDWIDTH, case.flops / SLOW_PEAK, SHORTEST)
    turns = min(max(2, round(TARGET / (least * copies))), 400)
    run = jax.jit(partial(_turns, case, impl, turns), donate_argnums=2, compiler_options=compiler_options(platform))
    carried, _ = jax.block_until_ready(run(shared, own, carried))
    runs = []
    for _ in range(repeats):
        began = time.perf_counter()
        carried, _ = jax.block_until_ready(run(shared, own, carried))
        runs.append((time.perf_counter() - began) / (turns * copies))
    return Timing(tuple(runs), copies, cold, turns * copies)


def _turns(case: Case, impl: Impl, turns: int, shared: Any, own: Sequence[Any], carried: Sequence[Any]) -> Any:
    """``turns`` times every copy; what is carried goes from turn to turn."""
    call = jax.jit(partial(case.call, impl))  # traced once for all copies; compiled, it is a part of the program

    def call_all(shared: Any, own: Sequence[Any], carried: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = [call(Inputs(mine, held, shared)) for mine, held in zip(own, carried, strict=True)]
        return [held for _, held in outputs], [results for results, _ in outputs]

    results = jax.eval_shape(call_all, shared, own, carried)[1]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    turn = lambda _, state: call_all(shared, own, state[0])  # noqa: E731
    return jax.lax.fori_loop(0, turns, turn, (list(carried), nothing))


def copy_bandwidth(repeats: int = 5, size: int = COPIED, turns: int = 10) -> float:
    """Bytes a second, read and written, of adding one to a large array; best of a few runs."""
    add = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, x: x + 1, x), donate_argnums=0)
    x = jax.block_until_ready(add(jnp.zeros(size // 4, jnp.float32)))
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        x = jax.block_until_ready(add(x))
        best = min(best, time.perf_counter() - began)
    return 2 * turns * size / best
