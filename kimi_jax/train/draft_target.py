"""The frozen target of draft training: what it says of whole sequences, on its own mesh and under its own layout."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.layers.taps import Taps
from kimi_jax.loop import Steps
from kimi_jax.model import Params, bind


@dataclass(frozen=True)
class TargetSteps(Steps):
    """``loop.Steps`` that read whole sequences for a draft.

    Attributes:
      drafter: the draft.
    """

    drafter: DraftSpec = field(kw_only=True)

    @classmethod
    def of(cls, steps: Steps, spec: DraftSpec, length: int) -> "TargetSteps":
        """Those of a loaded model for sequences of up to ``length`` tokens."""
        same: dict[str, Any] = {part.name: getattr(steps, part.name) for part in fields(Steps)} | {"capacity": length}
        return cls(**same, drafter=spec)

    @cached_property
    def read(self) -> Callable[..., tuple[Array, Array]]:
        """``read(params, cache, ids, lengths, wanted)`` -> tapped vectors and scores.

        Vectors are those of every token, [rows, tokens, taps, embed], scores those at the wanted positions, [rows, wanted, vocab].
        ``cache`` is an empty one and stays so: it is not donated.
        """
        specs, graph = self._specs, self.graph
        taps = Taps(self.drafter.taps, self.drafter.stream)

        def body(params: Params, cache: Any, ids: Any, lengths: Any, wanted: Any) -> tuple[Any, Any]:
            model = bind(graph, params)
            hidden, tapped, _ = model.tapped(ids, jnp.zeros_like(lengths), lengths, cache, taps)
            return tapped, model.logits(jnp.take_along_axis(hidden, wanted[..., None], axis=1))

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["grid"])
        return self._map(body, inputs, (self.spec("batch", None, None, None), specs["scores"]), donate=())
