"""The forward pass of training: the served modules over whole sequences from empty states; nothing is kept between calls.

A layer's inputs are all that its gradient keeps where ``remat`` is asked for; the rest is computed again.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.cache import KdaCache
from kimi_jax.layers.decoder import DecoderLayer, Residuals, enter
from kimi_jax.layers.image_rows import ImageRows, merge
from kimi_jax.layers.kda import Kda
from kimi_jax.model import KimiModel
from kimi_jax.train import attention
from kimi_jax.train.attention import Stage
from kimi_jax.train.balance import count_needs


class Forward(NamedTuple):
    """One pass.

    Attributes:
      hidden: [rows, tokens, embed], ready for ``model.logits``.
      index_loss: of all indexers, summed over real tokens.
      needs: for each expert layer, what bias every token would need for every expert, counted in bins [experts, bins].
    """

    hidden: Float[Array, "rows tokens embed"]
    index_loss: Float[Array, ""]
    needs: dict[str, Int[Array, "experts bins"]]


def forward(
    model: KimiModel,
    ids: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    *,
    stage: Stage = "sparse",
    remat: bool = False,
    images: ImageRows | None = None,
) -> Forward:
    """Runs whole sequences.

    Args:
      model: with float weights (``Precision.experts`` is ``masters``).
      ids: token ids; those at ``lengths`` and beyond are padding.
      lengths: tokens of each row.
      stage: what attention with an indexer reads (see ``train/attention``).
      remat: keep only what enters each layer.
      images: rows of pictures in place of their placeholders' embeddings.
    """
    real = jnp.arange(ids.shape[1]) < lengths[:, None]
    embedded = model.model.embed_tokens(ids)
    if images is not None:
        embedded = merge(embedded, images.rows, images.here)
    residuals, index_loss, needs = Residuals((), embedded), jnp.float32(0), {}
    for index, layer in enumerate(model.model.layers):
        run = partial(_layer, layer, stage)
        step = jax.checkpoint(run) if remat else run
        residuals, loss, counted = step(residuals, lengths, real)
        index_loss += loss
        if counted is not None:
            needs[f"model.layers.{index}.block_sparse_moe.gate.e_score_correction_bias"] = counted
    last = model.model
    hidden, _ = enter(residuals, last.output_attn_res_norm, last.output_attn_res_proj, last.norm, "reference")
    return Forward(hidden, index_loss, needs)


def _layer(
    layer: DecoderLayer,
    stage: Stage,
    residuals: Residuals,
    lengths: Int[Array, " rows"],
    real: Bool[Array, "rows tokens"],
) -> tuple[Residuals, Float[Array, ""], Int[Array, "experts bins"] | None]:
    """As ``DecoderLayer.__call__`` does it, with the sub-layers' training forms."""
    blocks, prefix, _ = residuals
    if blocks:
        mixing, row = layer.self_attention_res_norm, layer.self_attention_res_proj
        x, prefix = enter(residuals, mixing, row, layer.input_layernorm, "reference")
    else:
        x = layer.input_layernorm(prefix)
    y, index_loss = _attend(layer, x, lengths, real, stage)
    residuals = Residuals((*blocks, prefix), y) if layer.starts_block else Residuals(blocks, prefix, y)
    x, prefix = enter(residuals, layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm, "reference")
    if hasattr(layer, "mlp"):
        return Residuals(residuals.blocks, prefix, layer.parallel.psum(layer.mlp(x), "ffn")), index_loss, None
    moe = layer.block_sparse_moe
    counted = count_needs(moe, jax.lax.stop_gradient(x), real)
    return Residuals(residuals.blocks, prefix, moe(x, real)), index_loss, counted


def _attend(
    layer: DecoderLayer,
    x: Float[Array, "rows tokens embed"],
    lengths: Int[Array, " rows"],
    real: Bool[Array, "rows tokens"],
    stage: Stage,
) -> tuple[Float[Array, "rows tokens embed"], Float[Array, ""]]:
    if not isinstance(layer.self_attn, Kda):
        return attention.attend(layer.self_attn, x, real, stage)
    return layer.self_attn(x, lengths, _empty(layer.self_attn, x))[0], jnp.float32(0)


def _empty(kda: Kda, x: Float[Array, "rows tokens embed"]) -> KdaCache:
    """The state of sequences that begin."""
    channels, _, taps = kda.q_conv1d.weight[...].shape
    windows = jnp.zeros((x.shape[0], 3, taps - 1, channels), x.dtype)
    state = jnp.zeros((x.shape[0], channels // kda.head_dim, kda.head_dim, kda.head_dim), jnp.float32)
    return KdaCache(windows, state)
