"""The whole text model over one call's tokens: embedding, layers, output mix, head. Written in local view.

One forward serves prefill, decode and verification; only the number of tokens differs.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.cache import Cache, LayerCache
from kimi_jax.config import KimiConfig
from kimi_jax.layers import share
from kimi_jax.layers.decoder import DecoderLayer, Residuals, Row, Tokens, enter
from kimi_jax.layers.fp8 import hold_in_fp8
from kimi_jax.layers.image_rows import ImageRows, merge
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import array_spec, param
from kimi_jax.layers.taps import Taps, tap
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.kda.rollback import Pending
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision
from kimi_jax.quant.fp8_policy import fp8_policy

HeldCache = tuple[LayerCache | Pending, ...]
"""A cache after a call, which holds records in the place of new recurrent states where that was asked for."""


class Embedding(nnx.Module):
    """Token vectors, split by vocabulary."""

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel) -> None:
        self.weight = param((config.vocab, config.hidden), precision.operand, ("vocab", "embed"))
        self.dtype, self.parallel = precision.activation, parallel

    def __call__(self, ids: Int[Array, "rows tokens"]) -> Float[Array, "rows tokens embed"]:
        table = self.weight[...]
        local = ids - self.parallel.index("vocab") * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(here, local, 0)]
        return self.parallel.psum(jnp.where(here[..., None], rows, 0).astype(self.dtype), "vocab")


class Backbone(nnx.Module):
    """Everything below the head; names mirror the checkpoint's ``model.*``."""

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        self.embed_tokens = Embedding(config, precision, parallel)
        self.layers = nnx.List([DecoderLayer(i, config, precision, parallel, impls) for i in range(config.layers)])
        self.output_attn_res_norm = RmsNorm(config.hidden, config.rms_eps, precision)
        self.output_attn_res_proj = Row(config.hidden, precision)
        self.norm = RmsNorm(config.hidden, config.rms_eps, precision)


class KimiModel(nnx.Module):
    """Kimi-K3's text model.

    Args:
      config: sizes and layer kinds.
      precision: dtypes of activations and resident arrays.
      parallel: how named axes are cut; ``Parallel.single()`` on one device.
      impls: what each op runs.
    """

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        self.model = Backbone(config, precision, parallel, impls)
        self.lm_head = Linear(config.vocab, config.hidden, ("vocab", "embed"), precision)
        self.parallel, self.impls = parallel, impls
        hold_in_fp8(self, fp8_policy(precision.fp8))

    def __call__(
        self,
        ids: Int[Array, "rows tokens"],
        starts: Int[Array, " rows"],
        new: Int[Array, " rows"],
        cache: Cache,
        pages: Int[Array, "rows table"] | None = None,
        images: ImageRows | None = None,
    ) -> tuple[Float[Array, "rows tokens embed"], Cache]:
        """Runs ``new[b]`` tokens of each row from position ``starts[b]``.

        Args:
          ids: token ids; those at ``new[b]`` and beyond are padding and may be anything.
          starts: tokens already in the cache, int32.
          new: real tokens of this call per row; 0 leaves a row's cache as it is.
          cache: a row of every array per row of the call; with ``pages``, latent layers have a pool instead.
          pages: for each row the pages of the pools that hold its latent rows, in order.
          images: rows of pictures that take the place of their placeholders' embeddings; None for text alone.

        Returns:
          Hidden vectors ready for :meth:`logits` (garbage at padding), and the new cache.
        """
        x, _, entries = self._run(ids, starts, new, cache, pages, images, None, held=False)
        return x, cast(Cache, entries)

    def tapped(
        self,
        ids: Int[Array, "rows tokens"],
        starts: Int[Array, " rows"],
        new: Int[Array, " rows"],
        cache: Cache,
        taps: Taps,
        *,
        pages: Int[Array, "rows table"] | None = None,
        images: ImageRows | None = None,
        held: bool = False,
    ) -> tuple[Float[Array, "rows tokens embed"], Float[Array, "rows tokens taps embed"], HeldCache]:
        """As a call, with the tapped vectors of every token beside its last one.

        Args:
          ids, starts, new, cache, pages, images: as for a call.
          taps: what is read.
          held: recurrent layers keep their cache and give records of these tokens beside it, for a later ``commit``; latent rows
            are written, as their length decides what counts.
        """
        x, rows, entries = self._run(ids, starts, new, cache, pages, images, taps, held=held)
        return x, jnp.stack(rows, axis=2), entries

    def _run(
        self,
        ids: Int[Array, "rows tokens"],
        starts: Int[Array, " rows"],
        new: Int[Array, " rows"],
        cache: Cache,
        pages: Int[Array, "rows table"] | None,
        images: ImageRows | None,
        taps: Taps | None,
        *,
        held: bool,
    ) -> tuple[Float[Array, "rows tokens embed"], list[Float[Array, "rows tokens embed"]], HeldCache]:
        offsets = jnp.arange(ids.shape[1], dtype=jnp.int32)
        real = offsets < new[:, None]
        tokens = Tokens(jnp.where(real, starts[:, None] + offsets, -1), new, starts + new, pages, held)
        cut, width = not held and share.is_cut(ids.shape[1], self.parallel), ids.shape[1]
        if cut:
            tokens, ids, images = self._own(tokens, ids, images)
        embedded = self.model.embed_tokens(ids)
        if images is not None:
            embedded = merge(embedded, images.rows, images.here)
        residuals = Residuals((), embedded)
        entries, rows = [], []
        for index, (layer, entry) in enumerate(zip(self.model.layers, cache, strict=True)):
            residuals, entry = layer(residuals, tokens, entry)
            entries.append(entry)
            if taps is not None and index in taps.layers:
                rows.append(tap(*residuals, *self._reader(index + 1), taps.stream))
        last = self.model
        mixing, row = last.output_attn_res_norm, last.output_attn_res_proj
        x, _ = enter(residuals, mixing, row, last.norm, self.impls.attn_res)
        if cut:
            x, *rows = (self.parallel.all_gather(each, "tokens", 1)[:, :width] for each in (x, *rows))
        return x, rows, tuple(entries)

    def _own(
        self, tokens: Tokens, ids: Int[Array, "rows tokens"], images: ImageRows | None
    ) -> tuple[Tokens, Int[Array, "rows share"], ImageRows | None]:
        """This device's share of a call that is cut."""
        shares = share.counts(tokens.new, share.width_of(ids.shape[1], self.parallel), self.parallel)
        # counted from 1, so that what is added behind the end is padding
        positions = share.own(tokens.positions + 1, self.parallel) - 1
        if images is not None:
            images = ImageRows(*(share.own(array, self.parallel) for array in images))
        return tokens._replace(positions=positions, shares=shares), share.own(ids, self.parallel), images

    def _reader(self, index: int) -> tuple[RmsNorm, Float[Array, "one embed"]]:
        """Norm and projection of the site that mixes the sources at the entry of a layer, or behind the last one."""
        if index < len(self.model.layers):
            layer = self.model.layers[index]
            return layer.self_attention_res_norm, layer.self_attention_res_proj.weight[...]
        return self.model.output_attn_res_norm, self.model.output_attn_res_proj.weight[...]

    def logits(self, hidden: Float[Array, "*rows embed"]) -> Float[Array, "*rows local_vocab"]:
        """Scores of this rank's slice of the vocabulary, float32."""
        return self.lm_head(hidden, jnp.float32, self.impls.linear)


REFERENCE = Implementations()

Graph = nnx.GraphDef[KimiModel]
Params = Mapping[str, Any]
"""Flat parameters by dotted module path, the checkpoint's names after its prefix (experts stacked)."""


def abstract(
    config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations = REFERENCE
) -> tuple[Graph, dict[str, ArraySpec]]:
    """The model as a graph plus a description of every parameter; nothing is allocated.

    Shapes are whole, before any layout cuts or pads them; they do not depend on ``impls``.
    """
    graph, state = nnx.split(KimiModel(config, precision, parallel, impls))
    return graph, {dotted(path): array_spec(variable) for path, variable in nnx.to_flat_state(state)}


def bind(graph: Graph, params: Params) -> KimiModel:
    """The model over given arrays (whole ones, or one device's shards inside ``shard_map``)."""
    flat = [(tuple(int(p) if p.isdigit() else p for p in name.split(".")), nnx.Param(a)) for name, a in params.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def dotted(path: tuple[Any, ...]) -> str:
    """A module path as one name."""
    return ".".join(map(str, path))
