"""The draft's pass over many blocks of a sequence at once, as inference makes it over one (DSpark notes, sections 6 and 7).

Every anchor sees the context rows before its own position and its own block, nothing of the others: the anchors of a sequence are
one mapped dimension over ``Dspark.block``, and share its context rows without a copy.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.draft.dspark import Dspark
from kimi_jax.draft.markov import confidence_logit
from kimi_jax.ops.product import product


class Blocks(NamedTuple):
    """Scores of every drafted position with the Markov bias, and log odds of its confidence (None without such a head)."""

    scores: Float[Array, "rows anchors drafts vocab"]
    trust: Float[Array, "rows anchors drafts"] | None


def packed_blocks(
    draft: Dspark,
    embedded: Float[Array, "rows anchors drafts embed"],
    anchors: Int[Array, "rows anchors"],
    fused: Float[Array, "rows tokens embed"],
) -> Float[Array, "rows anchors drafts embed"]:
    """Final hidden vectors of a block behind every anchor.

    Args:
      draft: over its arrays.
      embedded: of each block the anchor's embedding, then that of the mask id.
      anchors: their positions; a block sees the context rows before.
      fused: tapped vectors of the whole sequence (:meth:`Dspark.fuse`).
    """
    places = jnp.broadcast_to(jnp.arange(fused.shape[1]), fused.shape[:2])
    context = tuple(layer.self_attn.rows(fused, places) for layer in draft.layers)

    def one(block: Array, anchor: Array, entries: tuple[tuple[Array, ...], ...]) -> Array:
        alone = jax.tree.map(lambda rows: rows[None], entries)
        return draft.block(block[None], anchor[None], alone)[0]

    over_anchors = jax.vmap(one, in_axes=(0, 0, None))
    return jax.vmap(over_anchors)(embedded, anchors, context)


def score_blocks(
    draft: Dspark,
    hidden: Float[Array, "rows anchors drafts embed"],
    before: Int[Array, "rows anchors drafts"],
    head: Callable[[Array], Array],
    scale: float,
) -> Blocks:
    """Scores as :meth:`Dspark.chain` would give them had it drafted the tokens of the text.

    Args:
      before: the token before each drafted position: the anchor, then what followed it.
      head: hidden vectors -> the target's scores.
      scale: of scores and bias alike.
    """
    markov = draft.markov_head
    e = markov.markov_w1.weight[...][before].astype(jnp.float32)
    scores = scale * (head(hidden) + product(e, markov.markov_w2.weight[...]))
    if not hasattr(draft, "confidence_head"):
        return Blocks(scores, None)
    proj = draft.confidence_head.proj
    return Blocks(scores, confidence_logit(proj.weight[...], proj.bias[...], hidden, e))
