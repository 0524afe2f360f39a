"""DSpark draft models: parameters, context cache, and the pass that turns an anchor into a drafted block.

Both published backbones are plain pre-norm residual stacks; embedding and head are the target's. Names are those of the draft
checkpoints (DSpark notes, section 4). MLP widths are cut over ``draft_ffn``, heads over ``draft_heads``; the context projection,
the latent projections and the Markov tables stay whole. Everything is XLA's.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.draft import markov
from kimi_jax.draft.attention import Entry, GqaAttention, MlaAttention, Place
from kimi_jax.draft.config import DraftConfig, GqaSizes
from kimi_jax.draft.rope import RopeConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import declared, param
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import FLOAT32, Precision

PLAIN = RopeConfig(10_000.0)
"""Stands in where only parameters are declared: rotation has none."""

Context = tuple[Entry, ...]
"""What a draft keeps of the committed tokens, layer by layer."""


class DraftMlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, precision: Precision, parallel: Parallel) -> None:
        self.gate_proj = Linear(width, hidden, ("draft_ffn", None), precision)
        self.up_proj = Linear(width, hidden, ("draft_ffn", None), precision)
        self.down_proj = Linear(hidden, width, (None, "draft_ffn"), precision)
        self.parallel = parallel

    def __call__(self, x: Float[Array, "rows drafts embed"]) -> Float[Array, "rows drafts embed"]:
        gate = self.gate_proj(x).astype(jnp.float32)
        inner = (jax.nn.silu(gate) * self.up_proj(x).astype(jnp.float32)).astype(x.dtype)
        return self.parallel.psum(self.down_proj(inner), "draft_ffn")


class DraftLayer(nnx.Module):
    """One pre-norm layer of either backbone."""

    def __init__(self, config: DraftConfig, rope: RopeConfig, precision: Precision, parallel: Parallel) -> None:
        sizes = config.attention
        attention = GqaAttention if isinstance(sizes, GqaSizes) else MlaAttention
        self.input_layernorm = RmsNorm(config.hidden, config.eps, precision)
        self.self_attn = attention(config.hidden, sizes, config.eps, rope, precision, parallel)  # pyright: ignore[reportArgumentType]
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps, precision)
        self.mlp = DraftMlp(config.hidden, config.ffn, precision, parallel)
        self.causal = config.sees == "past"

    def __call__(
        self, h: Float[Array, "rows drafts embed"], place: Place, entry: Entry
    ) -> Float[Array, "rows drafts embed"]:
        h = h + self.self_attn(self.input_layernorm(h), place, entry, causal=self.causal)
        return h + self.mlp(self.post_attention_layernorm(h))


class MarkovTable(nnx.Module):
    """One [vocab, rank] table, whole on every device."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        self.weight = param((config.vocab, config.markov_rank), precision.operand, (None, None))


class MarkovHead(nnx.Module):
    """Low-rank correction of a drafted position by the token before it."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        self.markov_w1 = MarkovTable(config, precision)
        self.markov_w2 = MarkovTable(config, precision)


class Confidence(nnx.Module):
    """One row and its bias over a hidden vector and, where it is wider, a Markov embedding; float32."""

    def __init__(self, config: DraftConfig) -> None:
        rank = config.markov_rank if config.confidence == "hidden and token" else 0
        self.weight = param((1, config.hidden + rank), FLOAT32, (None, None))
        self.bias = param((1,), FLOAT32, (None,))


class ConfidenceHead(nnx.Module):
    """How likely a drafted token is to be accepted."""

    def __init__(self, config: DraftConfig) -> None:
        self.proj = Confidence(config)


class Dspark(nnx.Module):
    """One draft model; the names around the layers depend on the backbone.

    Args:
      config: its sizes.
      precision: dtypes of activations and resident arrays.
      rope: its rotary positions.
      parallel: how named axes are cut.
    """

    def __init__(
        self, config: DraftConfig, precision: Precision, rope: RopeConfig = PLAIN, parallel: Parallel | None = None
    ) -> None:
        parallel = parallel or Parallel.single()
        context = Linear(config.hidden, config.taps * config.hidden, (None, None), precision)
        norms = [RmsNorm(config.hidden, config.eps, precision) for _ in range(2)]
        self.gqa = isinstance(config.attention, GqaSizes)
        if self.gqa:
            self.fc, self.hidden_norm, self.norm = context, *norms
        else:
            self.context_proj, self.context_norm, self.final_norm = context, *norms
        self.layers = nnx.List([DraftLayer(config, rope, precision, parallel) for _ in range(config.layers)])
        self.markov_head = MarkovHead(config, precision)
        if config.confidence != "none":
            self.confidence_head = ConfidenceHead(config)

    def fuse(self, taps: Float[Array, "rows tokens taps embed"]) -> Float[Array, "rows tokens embed"]:
        """Tapped vectors of the target, lowest layer first, as one vector per token."""
        project, norm = (self.fc, self.hidden_norm) if self.gqa else (self.context_proj, self.context_norm)
        return norm(project(taps.reshape(*taps.shape[:2], -1)))

    def write(
        self,
        h: Float[Array, "rows tokens embed"],
        starts: Int[Array, " rows"],
        counts: Int[Array, " rows"],
        context: Context,
        pages: Int[Array, "rows table"] | None = None,
    ) -> Context:
        """The context cache with the first ``counts`` fused vectors of each row in from position ``starts`` on.

        Args:
          pages: of each row in order, where the cache is a pool of pages; those written to must exist.
        """
        place = Place(starts[:, None] + jnp.arange(h.shape[1]), starts, counts, pages)
        return tuple(layer.self_attn.write(h, place, entry) for layer, entry in zip(self.layers, context, strict=True))

    def block(
        self,
        embedded: Float[Array, "rows drafts embed"],
        lengths: Int[Array, " rows"],
        context: Context,
        pages: Int[Array, "rows table"] | None = None,
    ) -> Float[Array, "rows drafts embed"]:
        """Final hidden vectors of a block.

        Args:
          embedded: the anchor's embedding, then that of the mask id.
          lengths: committed tokens of each row, which is the anchor's position.
          context: their rows.
          pages: of each row in order, where ``context`` is a pool of pages.
        """
        place = Place(lengths[:, None] + jnp.arange(embedded.shape[1]), lengths, lengths, pages)
        h = embedded
        for layer, entry in zip(self.layers, context, strict=True):
            h = layer(h, place, entry)
        return (self.norm if self.gqa else self.final_norm)(h)

    def chain(
        self,
        base: Float[Array, "rows drafts vocab"],
        hidden: Float[Array, "rows drafts embed"],
        anchor: Int[Array, " rows"],
        choose: Callable[[Array, int], Array],
        *,
        scale: float = 1.0,
    ) -> markov.Drafted:
        """Drafts the block token by token; see :func:`markov.chain`."""
        trust = None
        if hasattr(self, "confidence_head"):
            head = self.confidence_head.proj
            trust = partial(markov.confidence, head.weight[...], head.bias[...])
        w1, w2 = self.markov_head.markov_w1.weight[...], self.markov_head.markov_w2.weight[...]
        return markov.chain(base, hidden, anchor, w1, w2, choose, scale=scale, trust=trust)


def draft_parameters(config: DraftConfig, precision: Precision) -> dict[str, ArraySpec]:
    """Every parameter of a draft by its checkpoint name; embedding and head are the target's and not counted."""
    return declared(Dspark(config, precision))


def describe_draft_cache(config: DraftConfig, batch: int, length: int, precision: Precision) -> tuple[ArraySpec, ...]:
    """The draft's context cache, array by array: keys and values cut by head, or latent rows cut by position."""
    return tuple(spec for entry in describe_context(config, batch, length, precision) for spec in entry)


def describe_context(
    config: DraftConfig, batch: int, length: int, precision: Precision, *, paged: bool = False
) -> tuple[tuple[ArraySpec, ...], ...]:
    """The same layer by layer.

    Args:
      paged: a pool of ``batch`` pages of ``length`` tokens each, in the place of a row per sequence.
    """
    sizes, first = config.attention, "pages" if paged else "batch"
    if isinstance(sizes, GqaSizes):
        shape = (batch, length, sizes.kv_heads, sizes.head_dim)
        # never by position: one mesh axis cannot cut both, and heads need no collective
        entry = ArraySpec(shape, np.dtype(precision.activation), (first, None, "draft_heads", None))
        return ((entry, entry),) * config.layers
    shape = (batch, length, sizes.kv_rank + sizes.rope_dim)
    return ((ArraySpec(shape, np.dtype(precision.latent), (first, "sequence", None)),),) * config.layers
