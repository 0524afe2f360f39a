"""Bytes of an ask: weights by category and running state by kind, whole and on one device, and what that leaves."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.bytes import Bytes, bytes_by_category, bytes_of, total
from kimi_jax.placement.layout import Layout
from kimi_jax.planning.ask import Arrays, Ask, changed, of_weights, text_parameters, vision_arrays
from kimi_jax.planning.parts import CATEGORY_OF, category_of, part_of
from kimi_jax.precision import Precision

RELEASED_A_LOG = {96: 128}
"""Heads -> entries of ``A_log`` in the released file; only one per head is a value, and only those are placed."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of weights and state.

    Attributes:
      weights: row of the byte table -> bytes.
      state: row of the state table -> bytes of all sequences.
    """

    weights: Mapping[str, Bytes]
    state: Mapping[str, Bytes]

    @property
    def weight_bytes(self) -> int:
        """Parameters on one device."""
        return total(self.weights).per_device

    @property
    def state_bytes(self) -> int:
        """Running state on one device."""
        return total(self.state).per_device

    @property
    def cache_bytes(self) -> int:
        """The part of the state that lives from call to call: all but the scratch of a chunk."""
        return self.state_bytes - self.state["attn_res"].per_device

    @property
    def device_bytes(self) -> int:
        """Everything on one device."""
        return self.weight_bytes + self.state_bytes


def sizes(ask: Ask) -> Sizes:
    """Bytes of an ask under its layout. Raises LayoutError where the layout cannot cut an array."""
    held = of_weights(ask.precision)
    weights = _weights(changed(ask, context=1, batch=1, precision=held, prefill_chunk=1, memory_fraction=1.0))
    placed = ask.placed
    return Sizes(weights, {name: _sum(specs, placed) for name, specs in ask.state.items()})


@lru_cache(maxsize=64)
def _weights(ask: Ask) -> Mapping[str, Bytes]:
    """The rows of the byte table; what only the state depends on is the same in every ask that comes here."""
    rows = bytes_by_category(ask.weights, ask.placed, lambda name: category_of(name, ask.config))
    return MappingProxyType({row: rows[row] for row in dict.fromkeys(CATEGORY_OF.values()) if row in rows})


def _sum(specs: Sequence[ArraySpec], layout: Layout) -> Bytes:
    rows = Bytes()
    for spec, count in Counter(specs).items():  # the layers of a kind share one spec
        one = bytes_of(spec, layout)
        rows += Bytes(count, one.whole * count, one.per_device * count, one.padding * count)
    return rows


@dataclass(frozen=True)
class Parameters:
    """How many numbers the model has, MXFP4 values unpacked and scales not counted.

    Attributes:
      total: of the released checkpoint, vision and the unused entries of ``A_log`` included.
      active: read for one text token: the chosen experts, one row of the embedding, everything else but vision.
      active_without_head: the same without the output head, which some counts leave out.
    """

    total: int
    active: int
    active_without_head: int


def count_parameters(ask: Ask) -> Parameters:
    """Parameters of the model of an ask; independent of layout and dtype."""
    config, stored = ask.config, Precision()
    text = text_parameters(config, stored)
    moe, kda = config.moe, config.kda
    whole, active, head = 0, 0, 0
    for name, spec in text.items():
        values, part = values_of(name, spec), part_of(name, config)
        whole += values
        head += values if part == "head" else 0
        if part == "routed_experts":
            active += values // moe.experts * moe.top_k
        elif part == "embedding":
            active += config.hidden
        else:
            active += values
    unused = RELEASED_A_LOG.get(kda.heads, kda.heads) - kda.heads
    vision: Arrays = vision_arrays(config, stored)
    whole += unused * len(config.layers_of("kda")) + sum(values_of(name, spec) for name, spec in vision.items())
    return Parameters(whole, active, active - head)


def values_of(name: str, spec: ArraySpec) -> int:
    """Numbers that a parameter holds: two in a byte of packed codes, none in a scale."""
    if name.endswith("_scale"):
        return 0
    return math.prod(spec.logical if name.endswith("weight_packed") else spec.shape)
