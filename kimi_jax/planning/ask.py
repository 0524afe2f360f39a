"""What is to be planned: one frozen record from which every table follows, and the declared arrays it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from kimi_jax.cache import Cache, KdaCache, describe, describe_sources
from kimi_jax.config import KimiConfig
from kimi_jax.draft.config import DraftConfig
from kimi_jax.draft.dspark import describe_draft_cache, draft_parameters
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.model import abstract
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.device import Device
from kimi_jax.placement.layout import Layout
from kimi_jax.planning.parts import DRAFT
from kimi_jax.precision import Precision
from kimi_jax.quant.fp8_policy import Fp8Policy

UNTREATED = Fp8Policy()
VisionPlace = Literal["off", "replicated", "split"]
DraftPlace = Literal["split", "replicated"]
Arrays = Mapping[str, ArraySpec]


@dataclass(frozen=True)
class Ask:
    """One configuration on one layout of one device.

    Attributes:
      context: tokens that each sequence can hold.
      batch: sequences held at once, over the whole mesh.
      vision: whether tower and projector are loaded; ``split`` cuts what the devices that share the heads divide.
      draft: a draft model beside the target, or None.
      draft_place: ``split`` cuts the draft's heads and MLPs over the devices that share the heads.
      prefill_chunk: most prompt tokens of one call.
      memory_fraction: share of a device's memory that arrays may take; the rest is for compiler workspace and driver.
    """

    config: KimiConfig
    layout: Layout
    device: Device
    context: int
    batch: int
    precision: Precision
    fp8: Fp8Policy = UNTREATED
    vision: VisionPlace = "off"
    draft: DraftConfig | None = None
    draft_place: DraftPlace = "split"
    prefill_chunk: int = 8192
    memory_fraction: float = 0.93

    @property
    def placed(self) -> Layout:
        """The layout with what the options add to it."""
        return with_options(self)

    @property
    def rows(self) -> int:
        """Sequences that are held: the batch in equal shares over the replicas."""
        return _whole_shares(self.batch, self.layout.parts("batch"))

    @property
    def length(self) -> int:
        """Tokens that are held per sequence: the context in whole turns of the devices that split it."""
        return self.layout.held_positions(self.context)

    @property
    def chunk(self) -> int:
        """New tokens of the longest prefill call: no call holds more than a sequence can."""
        return min(self.prefill_chunk, self.context)

    @property
    def weights(self) -> Arrays:
        """Every parameter that is loaded."""
        text = text_parameters(self.config, self.precision, self.fp8)
        loaded = dict(text)
        if self.vision != "off":
            loaded |= vision_arrays(self.config, self.precision)
        if self.draft is not None:
            loaded |= {f"{DRAFT}{name}": spec for name, spec in draft_arrays(self.draft, self.precision).items()}
        return loaded

    @property
    def running(self) -> Precision:
        """The dtypes of the steps that run it."""
        return replace(self.precision, fp8=self.fp8.name)

    @property
    def cache(self) -> Cache:
        """The text model's cache."""
        return describe(self.config, self.rows, self.length, self.precision)

    @property
    def state(self) -> dict[str, list[ArraySpec]]:
        """Everything that running sequences hold, by row of the state table."""
        rows: dict[str, list[ArraySpec]] = {"latent": [], "index_keys": [], "kda_state": [], "kda_conv": []}
        for entry in self.cache:
            if isinstance(entry, KdaCache):
                rows["kda_state"].append(entry.state)
                rows["kda_conv"].append(entry.conv)
                continue
            rows["latent"].append(entry.latent)
            if entry.index:
                rows["index_keys"] += [entry.index.keys, *([entry.index.scales] if entry.index.scales else [])]
        rows["attn_res"] = [describe_sources(self.config, self.chunk, self.precision)]
        if self.draft is not None:
            rows["draft_context"] = list(describe_draft_cache(self.draft, self.rows, self.length, self.precision))
        return {name: specs for name, specs in rows.items() if specs}

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Weights and state by name: what a layout must be able to cut."""
        state = {f"{name}[{i}]": spec for name, specs in self.state.items() for i, spec in enumerate(specs)}
        return {**self.weights, **state}


def with_options(ask: Ask) -> Layout:
    """The layout of an ask with the axes of vision and draft mapped as its options say."""
    layout, axes = ask.layout, dict(ask.layout.axes)
    heads = layout.mesh_axes("heads")
    if ask.draft is not None and ask.draft_place == "split":
        axes = {"draft_heads": heads, "draft_ffn": heads, **axes}
    if ask.vision == "split" and ask.config.vision is not None:
        sizes = {"vision_heads": ask.config.vision.heads, "vision_ffn": ask.config.vision.mlp_width}
        cut = {axis: heads for axis, size in sizes.items() if size % layout.parts("heads") == 0}
        dealt = {"images"} if cut else set()  # devices that share a tower cannot hold different pictures
        axes = {**cut, **{axis: over for axis, over in axes.items() if axis not in dealt}}
    if axes == dict(layout.axes):
        return layout
    return replace(layout, axes=axes)


def text_parameters(config: KimiConfig, precision: Precision, fp8: Fp8Policy = UNTREATED) -> Arrays:
    """The text model's parameters, treated; the dtypes of the caches play no part."""
    return _text(config, replace(of_weights(precision), fp8=fp8.name))


def vision_arrays(config: KimiConfig, precision: Precision) -> Arrays:
    """The tower's and the projector's parameters; nothing where the model has none."""
    return _vision(config, of_weights(precision))


def draft_arrays(config: DraftConfig, precision: Precision) -> Arrays:
    """A draft's parameters."""
    return _draft(config, of_weights(precision))


def of_weights(precision: Precision) -> Precision:
    """The dtypes that decide how weights are held, without those of the caches."""
    return Precision(precision.activation, precision.operand, precision.projection, experts=precision.experts)


@lru_cache(maxsize=8)
def _text(config: KimiConfig, precision: Precision) -> Arrays:
    return MappingProxyType(abstract(config, precision, Parallel.single())[1])


@lru_cache(maxsize=4)
def _vision(config: KimiConfig, precision: Precision) -> Arrays:
    return MappingProxyType(vision_parameters(config, precision))


@lru_cache(maxsize=4)
def _draft(config: DraftConfig, precision: Precision) -> Arrays:
    return MappingProxyType(draft_parameters(config, precision))


def changed(ask: Ask, **fields: object) -> Ask:
    """An ask with some fields replaced."""
    return replace(ask, **fields)  # pyright: ignore[reportArgumentType]


def _whole_shares(size: int, parts: int) -> int:
    return -(-size // parts) * parts
