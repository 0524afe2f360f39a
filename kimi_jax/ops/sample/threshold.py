"""Top-k and top-p over a split vocabulary: a radix descent finds the score at the cut from small summed histograms.

Four passes of 256 bins fix all 32 bits of the cut exactly; only histograms cross devices, never scores.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.placement.collectives import Parallel

BITS = 8
BINS = 1 << BITS


def sortable(values: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Integers in the order of the floats; -0.0 and 0.0 are one value."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def cut(
    keys: UInt32[Array, "rows local_vocab"],
    weights: Float[Array, "rows local_vocab"],
    target: Float[Array, " rows"],
    parallel: Parallel,
) -> UInt32[Array, " rows"]:
    """The largest key such that the weights at or above it sum to at least ``target``; 0 when all together do not."""

    def level(shift: int, prefix: UInt32[Array, " rows"], above: Float[Array, " rows"]) -> tuple:
        inside = (
            (keys >> shift >> BITS) == (prefix >> BITS)[:, None] if shift < 32 - BITS else jnp.ones(keys.shape, bool)
        )
        bins = ((keys >> shift) & (BINS - 1)).astype(jnp.int32)
        rows = jnp.arange(keys.shape[0])[:, None]
        local = jnp.zeros((keys.shape[0], BINS), jnp.float32).at[rows, bins].add(jnp.where(inside, weights, 0.0))
        counts = parallel.psum(local, "vocab")
        reached = above[:, None] + jnp.cumsum(counts[:, ::-1], axis=-1)
        step = jnp.argmax(reached >= target[:, None], axis=-1)
        enough = reached[:, -1] >= target
        chosen = jnp.where(enough, BINS - 1 - step, 0).astype(jnp.uint32)
        over = jnp.take_along_axis(reached - counts[:, ::-1], (BINS - 1 - chosen.astype(jnp.int32))[:, None], axis=-1)[
            :, 0
        ]
        return chosen, over

    prefix = jnp.zeros(keys.shape[0], jnp.uint32)
    above = jnp.zeros(keys.shape[0], jnp.float32)
    for shift in (24, 16, 8, 0):
        chosen, above = level(shift, prefix, above)
        prefix = (prefix | chosen) << (BITS if shift else 0)
    return prefix


def likely(
    scores: Float[Array, "rows local_vocab"], min_p: Float[Array, " rows"], parallel: Parallel
) -> Float[Array, "rows local_vocab"]:
    """Scores of ids at least ``min_p`` times as likely as the likeliest, -inf for the rest; 0 keeps everything."""
    peak = _peak(scores, parallel)
    return jnp.where(jnp.exp(scores - peak[:, None]) >= min_p[:, None], scores, -jnp.inf)


def _peak(scores: Float[Array, "rows local_vocab"], parallel: Parallel) -> Float[Array, " rows"]:
    """The largest score of each row over all shares, 0 where none is finite."""
    peak = parallel.all_gather(jnp.max(scores, axis=-1)[None], "vocab", 0).max(axis=0)
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def keep(
    scores: Float[Array, "rows local_vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    parallel: Parallel,
) -> Bool[Array, "rows local_vocab"]:
    """Ids that survive top-k, and of those the smallest set of the likeliest whose probability reaches top-p.

    Args:
      scores: this device's slice of logits over temperature; -inf is never kept.
      top_k: 0 keeps everything.
      top_p: 1 keeps everything.
    """
    keys = sortable(scores)
    possible = scores > -jnp.inf
    count_cut = cut(keys, possible.astype(jnp.float32), top_k.astype(jnp.float32), parallel)
    kept = possible & ((keys >= count_cut[:, None]) | (top_k <= 0)[:, None])
    mass = jnp.where(kept, jnp.exp(scores - _peak(scores, parallel)[:, None]), 0.0)
    total = parallel.psum(mass.sum(axis=-1), "vocab")
    mass_cut = cut(keys, mass, top_p * total, parallel)
    return kept & ((keys >= mass_cut[:, None]) | (top_p >= 1.0)[:, None])
