"""Bounds of an ask: decode steps with nothing cached and at the end of the context, first and last prefill chunk."""

from dataclasses import dataclass

from kimi_jax.placement.roofline import Bound, bound
from kimi_jax.planning.ask import Ask
from kimi_jax.planning.step import Step, step, touched_experts


@dataclass(frozen=True)
class Call:
    """One call and its bound.

    Attributes:
      kind: ``decode`` or ``prefill``.
      rows: sequences over the whole mesh.
      tokens: new tokens of each.
      context: cached tokens of each before the call.
      experts: distinct routed experts of a layer that the tokens of one replica are expected to touch.
      bound: what the call costs on one device.
    """

    kind: str
    rows: int
    tokens: int
    context: int
    experts: float
    bound: Bound

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of the whole mesh by the modelled time."""
        return None if not self.bound.modelled else self.rows * self.tokens / self.bound.modelled


def decode(ask: Ask, context: int) -> Call:
    """One decode step of the ask's batch, one new token a sequence."""
    return _call("decode", ask, ask.rows, 1, context)


def prefill(ask: Ask, context: int) -> Call:
    """One chunk of one prompt on each replica."""
    return _call("prefill", ask, ask.layout.parts("batch"), ask.chunk, context)


def all_calls(ask: Ask) -> tuple[Call, ...]:
    """Decode from empty and at the end of the context; the first and the last prefill chunk."""
    contexts = dict.fromkeys((0, ask.context - 1))
    chunks = dict.fromkeys((0, ask.context - ask.chunk))
    return (*(decode(ask, seen) for seen in contexts), *(prefill(ask, seen) for seen in chunks))


def _call(kind: str, ask: Ask, rows: int, tokens: int, context: int) -> Call:
    done = step_of(ask, rows, tokens, context)
    experts = touched_experts(ask.config, rows * tokens / ask.layout.parts("batch"))
    return Call(kind, rows, tokens, context, experts, bound(done.work, done.collectives, ask.device))


def step_of(ask: Ask, rows: int, tokens: int, context: int) -> Step:
    """The step of an ask."""
    return step(
        ask.config, ask.placed, ask.weights, ask.cache, ask.precision, rows=rows, tokens=tokens, context=context
    )
