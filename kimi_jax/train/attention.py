"""Latent attention of whole sequences for training, over the modules that serve: direct form, nothing cached, differentiable.

Where there is an indexer its choice has no gradient. It learns by a loss of its own, as in DeepSeek Sparse Attention, from which
K3.1 Pro takes it: the Kullback-Leibler divergence of the softmax of its scores from what the heads attend to on average, neither
of which reaches the rest of the model. ``dense``: attention and loss over every visible token, which warms the indexer up.
``sparse``: both over the chosen ones, as the model will be served.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kimi_jax.layers.mla import Mla
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.mla.reference import einsum, gated
from kimi_jax.placement.collectives import Parallel

Stage = Literal["dense", "sparse"]

HIDDEN = -1e30
"""Score of a token that is not attended to: finite, so that a row of nothing but padding has no NaN."""


class Attended(NamedTuple):
    """One sub-layer's result [rows, tokens, embed], and the indexer's loss summed over real tokens (0 without an indexer)."""

    out: Float[Array, "rows tokens embed"]
    index_loss: Float[Array, ""]


def attend(
    layer: Mla, x: Float[Array, "rows tokens embed"], real: Bool[Array, "rows tokens"], stage: Stage
) -> Attended:
    """Causal attention of every token of each row; padding comes last in a row, so nothing real sees it."""
    sizes = layer.sizes
    readers = (layer.q_a_proj, layer.kv_a_proj_with_mqa, layer.g_proj)
    query_latent, row, gate = linear_op.project_many(x, [reader.factor for reader in readers])
    query_latent = layer.parallel.all_gather(query_latent, "q_lora", -1)
    query_latent = layer.q_a_layernorm(query_latent)
    query = layer.q_b_proj(query_latent).reshape(*x.shape[:2], -1, sizes.query_dim)
    latent, shared_key = layer.kv_a_layernorm(row[..., : sizes.kv_rank]), row[..., sizes.kv_rank :]
    expand = layer.kv_b_proj.weight[...].astype(x.dtype).reshape(query.shape[2], -1, sizes.kv_rank)
    expanded = einsum("bsr,ndr->bsnd", latent, expand).astype(x.dtype)
    own, shared = query[..., : sizes.nope_dim], query[..., sizes.nope_dim :]
    keys, values = expanded[..., : sizes.nope_dim], expanded[..., sizes.nope_dim :]
    score = einsum("btnd,bsnd->bnts", own, keys) + einsum("btnd,bsd->bnts", shared, shared_key)

    offset = jnp.arange(x.shape[1])
    seen = jnp.broadcast_to(offset <= offset[:, None], (x.shape[0], x.shape[1], x.shape[1]))
    indexed = None
    if hasattr(layer, "indexer"):
        indexed = _index_scores(layer, lax.stop_gradient(x), lax.stop_gradient(query_latent))
        if stage == "sparse" and x.shape[1] > layer.indexer.sizes.top_k:
            seen &= chosen(lax.stop_gradient(jnp.where(seen, indexed, -jnp.inf)), layer.indexer.sizes.top_k)
    weight = jax.nn.softmax(jnp.where(seen[:, None], score * sizes.query_dim**-0.5, HIDDEN), axis=-1)
    out = einsum("bnts,bsnd->btnd", weight.astype(x.dtype), values)
    out = gated(out, gate.reshape(out.shape)).reshape(*x.shape[:2], -1)
    loss = jnp.float32(0)
    if indexed is not None:
        loss = _divergence(lax.stop_gradient(weight), indexed, seen, real, layer.parallel)
    return Attended(layer.parallel.psum(layer.o_proj(out), "heads"), loss)


def chosen(scores: Float[Array, "rows tokens length"], k: int) -> Bool[Array, "rows tokens length"]:
    """Which positions the ``k`` best are, as a mask; ties to the smaller position, -inf is never chosen (``indexer.top_k``)."""
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 ties with +0.0
    least = lax.top_k(scores, k)[0][..., -1:]
    better, equal = scores > least, scores == least
    left = k - jnp.sum(better, axis=-1, keepdims=True)
    return (better | (equal & (jnp.cumsum(equal, axis=-1) <= left))) & (scores > -jnp.inf)


def _index_scores(
    layer: Mla, x: Float[Array, "rows tokens embed"], query_latent: Float[Array, "rows tokens q_rank"]
) -> Float[Array, "rows tokens length"]:
    """What the indexer gives every token, float32; ``query_latent`` is normalised."""
    indexer = layer.indexer
    keys, weights = indexer.read(x)
    keys = indexer.k_norm(keys).astype(x.dtype)
    asked = indexer.wq_b(query_latent).reshape(*x.shape[:2], -1, indexer.sizes.head_dim)
    asked = layer.parallel.all_gather(asked, "index_heads", 2)
    product = einsum("bthd,bsd->bhts", asked.astype(jnp.float32), keys.astype(jnp.float32))
    return einsum("bhts,bth->bts", jax.nn.relu(product), weights)


def _divergence(
    weight: Float[Array, "rows heads tokens length"],
    scores: Float[Array, "rows tokens length"],
    seen: Bool[Array, "rows tokens length"],
    real: Bool[Array, "rows tokens"],
    parallel: Parallel,
) -> Float[Array, ""]:
    """Of the indexer's softmax from the mean attention of all heads, over the tokens attended to; summed over real tokens."""
    target = parallel.psum(jnp.sum(weight, axis=1), "heads") / (weight.shape[1] * parallel.size("heads"))
    log = jax.nn.log_softmax(jnp.where(seen, scores, HIDDEN), axis=-1)
    some = seen & (target > 0)
    each = jnp.where(some, target * (jnp.log(jnp.where(some, target, 1.0)) - log), 0.0)
    return jnp.sum(jnp.where(real, jnp.sum(each, axis=-1), 0.0))
