"""Counts what the backend compiles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
_seen: list[float] = []


def _listen(event: str, seconds: float, **_: Any) -> None:
    if event == COMPILED:
        _seen.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many programs were compiled since."""
    before = len(_seen)
    yield lambda: len(_seen) - before
