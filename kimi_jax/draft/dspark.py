"""DSpark draft models: their parameters and context cache are declared here; their forward is not built yet.

Both published backbones are plain pre-norm residual stacks; embedding and head are the target's. Names are those of
the draft checkpoints (draft notes, section 4). Heads are cut over ``draft_heads`` and MLP widths over ``draft_ffn``;
the context projection, the latent projections and the Markov tables stay whole.
"""

from typing import Any, NoReturn

import numpy as np
from flax import nnx

from kimi_jax.draft.config import DraftConfig, GqaSizes, MlaSizes
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import declared, param
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.precision import Precision

EPS = 1e-5
"""Every norm of a draft, also those of its latents (draft notes, section 6)."""

ONLY_DECLARED = "the draft model is declared (plan, bytes, names) but its forward is not built yet; load without draft"


class GqaAttention(nnx.Module):
    """Queries and fewer keys and values, each with a norm per head."""

    def __init__(self, hidden: int, sizes: GqaSizes, precision: Precision) -> None:
        rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        by_head = ("draft_heads", None)
        self.q_proj = Linear(rows, hidden, by_head, precision, (sizes.heads, hidden))
        self.k_proj = Linear(kv_rows, hidden, by_head, precision, (sizes.kv_heads, hidden))
        self.v_proj = Linear(kv_rows, hidden, by_head, precision, (sizes.kv_heads, hidden))
        self.q_norm = RmsNorm(sizes.head_dim, EPS, precision)
        self.k_norm = RmsNorm(sizes.head_dim, EPS, precision)
        self.o_proj = Linear(hidden, rows, (None, "draft_heads"), precision, (hidden, sizes.heads))


class MlaAttention(nnx.Module):
    """Latent attention; the latents are whole on every device."""

    def __init__(self, hidden: int, sizes: MlaSizes, precision: Precision) -> None:
        heads, query = sizes.heads, sizes.nope_dim + sizes.rope_dim
        expanded = heads * (sizes.nope_dim + sizes.value_dim)
        by_head = ("draft_heads", None)
        self.q_a_proj = Linear(sizes.q_rank, hidden, (None, None), precision)
        self.q_a_layernorm = RmsNorm(sizes.q_rank, EPS, precision)
        self.q_b_proj = Linear(heads * query, sizes.q_rank, by_head, precision, (heads, sizes.q_rank))
        self.kv_a_proj_with_mqa = Linear(sizes.kv_rank + sizes.rope_dim, hidden, (None, None), precision)
        self.kv_a_layernorm = RmsNorm(sizes.kv_rank, EPS, precision)
        self.kv_b_proj = Linear(expanded, sizes.kv_rank, by_head, precision, (heads, sizes.kv_rank))
        out = (hidden, heads * sizes.value_dim)
        self.o_proj = Linear(*out, (None, "draft_heads"), precision, (hidden, heads))


class DraftMlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, precision: Precision) -> None:
        self.gate_proj = Linear(width, hidden, ("draft_ffn", None), precision)
        self.up_proj = Linear(width, hidden, ("draft_ffn", None), precision)
        self.down_proj = Linear(hidden, width, (None, "draft_ffn"), precision)


class DraftLayer(nnx.Module):
    """One pre-norm layer of either backbone."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        sizes = config.attention
        attention = GqaAttention if isinstance(sizes, GqaSizes) else MlaAttention
        self.input_layernorm = RmsNorm(config.hidden, EPS, precision)
        self.self_attn = attention(config.hidden, sizes, precision)  # pyright: ignore[reportArgumentType]
        self.post_attention_layernorm = RmsNorm(config.hidden, EPS, precision)
        self.mlp = DraftMlp(config.hidden, config.ffn, precision)


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
    """One row and its bias over a hidden vector and a Markov embedding."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        self.weight = param((1, config.hidden + config.markov_rank), precision.operand, (None, None))
        self.bias = param((1,), precision.operand, (None,))


class ConfidenceHead(nnx.Module):
    """How likely a drafted token is to be accepted."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        self.proj = Confidence(config, precision)


class Dspark(nnx.Module):
    """One draft model; the names around the layers depend on the backbone."""

    def __init__(self, config: DraftConfig, precision: Precision) -> None:
        context = Linear(config.hidden, config.taps * config.hidden, (None, None), precision)
        norms = [RmsNorm(config.hidden, EPS, precision) for _ in range(2)]
        if isinstance(config.attention, GqaSizes):
            self.fc, self.hidden_norm, self.norm = context, *norms
        else:
            self.context_proj, self.context_norm, self.final_norm = context, *norms
        self.layers = nnx.List([DraftLayer(config, precision) for _ in range(config.layers)])
        self.markov_head = MarkovHead(config, precision)
        self.confidence_head = ConfidenceHead(config, precision)

    def __call__(self, *inputs: Any) -> NoReturn:
        raise NotImplementedError(ONLY_DECLARED)


def draft_parameters(config: DraftConfig, precision: Precision) -> dict[str, ArraySpec]:
    """Every parameter of a draft by its checkpoint name; embedding and head are the target's and not counted."""
    return declared(Dspark(config, precision))


def describe_draft_cache(config: DraftConfig, batch: int, length: int, precision: Precision) -> tuple[ArraySpec, ...]:
    """The draft's context cache, layer by layer: keys and values cut by head, or latent rows cut by position."""
    sizes = config.attention
    if isinstance(sizes, GqaSizes):
        shape = (batch, length, sizes.kv_heads, sizes.head_dim)
        # never by position: one mesh axis cannot cut both, and heads need no collective
        entry = ArraySpec(shape, np.dtype(precision.activation), ("batch", None, "draft_heads", None))
        return (entry,) * (2 * config.layers)
    shape = (batch, length, sizes.kv_rank + sizes.rope_dim)
    return (ArraySpec(shape, np.dtype(precision.latent), ("batch", "sequence", None)),) * config.layers
