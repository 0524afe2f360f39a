"""How a fault is planted in the running model, and how far it moves the logits of a golden prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kimi_jax.config import KimiConfig
from tests.parity import trace
from tests.parity.models import logits, prompt

PROMPT = 3
CUT = range(1, len(prompt(PROMPT)))
"""Token by token, for faults that need more than one call."""


@dataclass
class Site:
    """What a fault may change.

    Attributes:
      patch: for functions and attributes; undone afterwards.
      params: float32 parameters by dotted path, a copy.
      sizes: the configuration.
      cuts: where the prompt is cut into calls.
    """

    patch: pytest.MonkeyPatch
    params: dict[str, Any] = field(default_factory=lambda: dict(trace.parameters()))
    sizes: KimiConfig = field(default_factory=trace.config)
    cuts: Sequence[int] = ()

    def wrap(self, op: str, wrapper: Callable[..., Any]) -> None:
        """Calls ``wrapper(op, *args, **kwargs)`` wherever the model calls one of the heavy ops."""
        shipped = trace.compiled(op)
        self.patch.setattr(trace.HEAVY[op][0], op, lambda *args, **kwargs: wrapper(shipped, *args, **kwargs))

    def recompile(self, op: str) -> None:
        """Compiles a heavy op again, after something inside it was patched."""
        self.patch.setattr(trace.HEAVY[op][0], op, trace.compiled_anew(op))

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces ``owner.name`` by ``make(what it was)``."""
        self.patch.setattr(owner, name, make(getattr(owner, name)))

    def change(self, ending: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Changes every parameter whose path has this ending."""
        names = [name for name in self.params if name.endswith(ending)]
        assert names, f"no parameter ends in {ending}"
        for name in names:
            self.params[name] = np.ascontiguousarray(change(np.asarray(self.params[name])))

    def swap(self, first: str, second: str) -> None:
        """Exchanges the parameters of two endings."""
        for name in [name for name in self.params if name.endswith(first)]:
            other = name.removesuffix(first) + second
            self.params[name], self.params[other] = self.params[other], self.params[name]


Plant = Callable[[Site], None]


def error(plant: Plant | None = None, cuts: Sequence[int] = ()) -> float:
    """Largest logit error of the golden prompt with a fault planted; infinite where something is not finite."""
    with trace.compiled_ops() as patch:
        site = Site(patch, cuts=cuts)
        if plant:
            plant(site)
        scores, *_ = trace.forward(prompt(PROMPT), site.cuts, site.params, site.sizes)
    found = np.abs(scores - logits(PROMPT)).max()
    return float(found) if np.isfinite(found) else float("inf")
