"""The loop of every training run: one jitted update after another, saved and measured, and resumed to the same bits.

Resume is exact because nothing is left out of the saved state: the data of a step is a function of its number, and the update is
a function of state and data.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from kimi_jax.train.checkpoint import Checkpoints
from kimi_jax.train.metrics import Metrics
from kimi_jax.train.state import TrainingError, TrainState

Update = Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]
"""One update: ``(state, batch)`` -> the next state, scalars that were measured on the way. Jitted, and it may donate the state."""

Batches = Callable[[int], Any]
"""Step -> its batch; equal steps give equal batches, in any process."""

Watch = Callable[[int, int, dict[str, float]], None]
"""``(updates done, updates in all, what was measured last)``."""


def unseen(done: int, total: int, measured: dict[str, float]) -> None:
    """Shows nothing."""


def run(
    update: Update,
    state: TrainState,
    batches: Batches,
    *,
    steps: int,
    checkpoints: Checkpoints | None = None,
    metrics: Metrics | None = None,
    every: int = 10,
    watch: Watch = unseen,
) -> TrainState:
    """Updates ``state`` until ``steps`` updates are done, from the newest checkpoint on where there is one.

    Args:
      update: one step.
      state: where a new run begins; not to be used afterwards if ``update`` donates.
      batches: the data.
      steps: updates in all, those before a resume counted.
      checkpoints: where the run is saved, also after its last step; None keeps nothing.
      metrics: where measurements go; those of a step are of that step alone, so that a resumed run repeats them.
      every: steps between two measurements, the first and the last step measured too. Only then the host waits for the device.
      watch: called after every measurement and every checkpoint.

    Raises:
      TrainingError: a measured value is not finite: the run stops before such weights are saved; or a resume that does not fit.
    """
    saved = checkpoints.restore(state) if checkpoints is not None else None
    state = saved if saved is not None else state
    done = int(state.step)
    if done > steps:
        raise TrainingError("Nothing is left to train", [f"the checkpoint has {done} updates, {steps} are asked for"])
    if metrics is not None:
        metrics.resume(done)
    last, begun = done, time.monotonic()
    while done < steps:
        state, scalars = update(state, batches(done))
        done += 1
        saves = checkpoints is not None and (done % checkpoints.every == 0 or done == steps)
        if saves or done % every == 0 or done == steps or done == 1:
            measured = _measured(scalars, done)
            seconds = (time.monotonic() - begun) / (done - last)
            if metrics is not None and (done % every == 0 or done == steps or done == 1):
                metrics.add(done, {**measured, "seconds_per_step": round(seconds, 6)})
            if checkpoints is not None and saves:
                checkpoints.save(state)
            watch(done, steps, measured)
            last, begun = done, time.monotonic()
    return state


def _measured(scalars: dict[str, Array], step: int) -> dict[str, float]:
    values = {name: float(value) for name, value in scalars.items()}
    broken = [f"{name} = {value} at update {step}" for name, value in values.items() if not math.isfinite(value)]
    if broken:
        hint = "Start again from the last checkpoint with a lower rate or a longer warm-up."
        raise TrainingError("Training went wrong", broken, hint)
    return values
