"""How far a model in a narrower form is from the same model in a wider one: the same prompts through both, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kimi_jax.api import Kimi
from kimi_jax.cache import Cache
from kimi_jax.layers.taps import Taps
from kimi_jax.loop import Steps
from kimi_jax.model import Params, bind

CHUNK = 128
"""Tokens of a call."""


class Seen(NamedTuple):
    """What one model computes of some prompts, laid behind one another.

    Attributes:
      logits: teacher forced.
      layers: the mixture of residual sources behind every layer, which the next one reads before its norm.
    """

    logits: Float[np.ndarray, "tokens vocab"]
    layers: Float[np.ndarray, "tokens layers embed"]


@dataclass(frozen=True)
class Distance:
    """How far a model is from another.

    Attributes:
      tokens: positions that were compared.
      kl_mean, kl_p99, kl_max: Kullback-Leibler divergence of the next token's distribution from the reference's, in nats.
      top1_agreement: share of positions where both put the same id first.
      logit_error: root mean square of the difference of logits over that of the reference's deviation from their mean.
      layer_errors: for each layer, norm of the difference over the norm of the reference, over all tokens.
    """

    tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    logit_error: float
    layer_errors: tuple[float, ...]


@dataclass(frozen=True)
class _TappedSteps(Steps):
    """A model's programs, and one that also gives what stands between layers."""

    @cached_property
    def seen(self) -> Any:
        """``(params, cache, ids, starts, new)`` -> logits, vectors behind every layer, cache. Donates the cache."""
        specs, graph = self._specs, self.graph
        taps = Taps(tuple(range(self.config.layers)), "attn_res")

        def body(params: Params, cache: Cache, ids: Any, starts: Any, new: Any) -> tuple[Any, Any, Any]:
            model = bind(graph, params)
            hidden, layers, held = model.tapped(ids, starts, new, cache, taps)
            return model.logits(hidden), layers, held

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["row"])
        outputs = (specs["scores"], self.spec("batch", None, None, None), specs["cache"])
        return self._map(body, inputs, outputs, donate=(1,))


def see(model: Kimi, prompts: Sequence[Sequence[int]]) -> Seen:
    """Runs every prompt from an empty state."""
    steps = _TappedSteps(**{field.name: getattr(model.runner.steps, field.name) for field in fields(Steps)})
    parts = [part for prompt in prompts for part in _run(steps, model.runner.params, prompt)]
    return Seen(*(np.concatenate(kind) for kind in zip(*parts, strict=True)))


def _run(steps: _TappedSteps, params: Params, prompt: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = steps.parallel.size("batch")
    cache = steps.new_cache(rows)
    for start in range(0, len(prompt), CHUNK):
        part = prompt[start : start + CHUNK]
        ids, new = np.zeros((rows, CHUNK), np.int32), np.zeros(rows, np.int32)
        ids[0, : len(part)], new[0] = part, len(part)
        logits, layers, cache = steps.seen(params, cache, ids, np.full(rows, start, np.int32), new)
        yield np.asarray(logits)[0, : len(part)], np.asarray(layers.astype(jnp.float32))[0, : len(part)]
    jax.tree.map(lambda array: array.delete(), cache)


def distance(got: Seen, reference: Seen) -> Distance:
    """How far ``got`` is from ``reference``."""
    kl = np.concatenate(
        [_divergence(a, b) for a, b in zip(_blocks(reference.logits), _blocks(got.logits), strict=True)]
    )
    same = got.logits.argmax(axis=1) == reference.logits.argmax(axis=1)
    centred = reference.logits - reference.logits.mean(axis=1, keepdims=True)
    off = got.logits - reference.logits
    axes = (0, 2)
    norms = np.sqrt(np.sum(np.square(reference.layers, dtype=np.float64), axis=axes))
    apart = np.sqrt(np.sum(np.square(got.layers - reference.layers, dtype=np.float64), axis=axes))
    return Distance(
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1_agreement=float(same.mean()),
        logit_error=_size(off) / _size(centred),
        layer_errors=tuple(float(error) for error in apart / np.maximum(norms, np.finfo(np.float64).tiny)),
    )


def _blocks(logits: np.ndarray) -> list[np.ndarray]:
    """A few positions at a time: float64 copies of a large vocabulary are large."""
    return np.array_split(logits, -(-len(logits) // 64))


def _divergence(reference: np.ndarray, got: np.ndarray) -> np.ndarray:
    first, second = (_log_softmax(logits.astype(np.float64)) for logits in (reference, got))
    return np.maximum(np.sum(np.exp(first) * (first - second), axis=1), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
