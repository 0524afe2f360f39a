"""Learning rates over a run: functions of the updates done, in the form that optax calls a schedule.

Sources: warm-up and cosine for a draft (DSpark notes, section 12); warm-up, stable, decay for the model (training notes).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.train.state import TrainingError

Schedule = Callable[[Any], Float[Array, ""]]
"""Updates done, an int or an int32 scalar -> float32."""


def warmup_cosine(peak: float, warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """A straight line up to ``peak`` in ``warmup`` updates, then half a cosine down to ``floor * peak`` at ``steps``.

    The first update has the rate ``peak / warmup``, never zero.
    """
    _check(peak, floor, warmup=warmup, after=steps - warmup)

    def rate(step: Any) -> Float[Array, ""]:
        done = jnp.clip((jnp.asarray(step, jnp.float32) - warmup) / max(steps - warmup, 1), 0, 1)
        return _rising(peak, warmup, step) * (floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * done)))

    return rate


def warmup_stable_decay(peak: float, warmup: int, stable: int, decay: int, floor: float = 0.0) -> Schedule:
    """A straight line up to ``peak`` in ``warmup`` updates, ``stable`` updates of it, a straight line down to ``floor * peak``."""
    _check(peak, floor, warmup=warmup, stable=stable, decay=decay)

    def rate(step: Any) -> Float[Array, ""]:
        done = jnp.clip((jnp.asarray(step, jnp.float32) - warmup - stable) / max(decay, 1), 0, 1)
        return _rising(peak, warmup, step) * (1 - (1 - floor) * done)

    return rate


def _rising(peak: float, warmup: int, step: Any) -> Float[Array, ""]:
    return peak * jnp.clip((jnp.asarray(step, jnp.float32) + 1) / max(warmup, 1), 0, 1)


def _check(peak: float, floor: float, **counts: int) -> None:
    problems = [f"{name} = {value} updates; it must be 0 or more" for name, value in counts.items() if value < 0]
    if not peak > 0:
        problems.append(f"peak = {peak}; it must be positive")
    if not 0 <= floor <= 1:
        problems.append(f"floor = {floor}; it is a share of the peak, from 0 to 1")
    if problems:
        raise TrainingError("This learning rate cannot be scheduled", problems)
