"""Attention inside each of several sequences that lie behind one another in one array, every position seeing all of its own.

Blockwise with a running softmax: the scores of the longest picture would take 200 GB. A block of queries meets only the blocks
of keys that hold its own sequences, so work grows with the sum of squares of the lengths, not with the square of the sum.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_LOWEST = -1e30
"""Below every score, and finite: the difference of two is 0, not NaN."""


def attend(
    query: Float[Array, "tokens heads dim"],
    key: Float[Array, "tokens heads dim"],
    value: Float[Array, "tokens heads dim"],
    first: Int[Array, " tokens"],
    end: Int[Array, " tokens"],
    block: int,
) -> Float[Array, "tokens heads dim"]:
    """Softmax attention with scale 1/sqrt(dim); scores, softmax and sums in float32, probabilities in the dtype of ``value``.

    Args:
      query, key, value: finite everywhere.
      first: where the sequence of each position begins.
      end: one behind its last position; a position with ``end <= first`` belongs to none and gets zeros.
      block: queries, and keys, that meet at a time; divides the tokens.
    """
    tokens, heads, dim = query.shape
    exact = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    offsets = jnp.arange(block, dtype=jnp.int32)

    def one(of_block: tuple[Array, Array, Array]) -> Array:
        rows, low, high = of_block
        begin = jnp.min(jnp.where(high > low, low, tokens)) // block
        stop = (jnp.max(high) + block - 1) // block

        def meet(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = carry
            keys, values = (lax.dynamic_slice_in_dim(x, at * block, block) for x in (key, value))
            scores = jnp.einsum("qhd,khd->hqk", rows, keys, precision=exact, preferred_element_type=jnp.float32)
            position = at * block + offsets
            seen = (position >= low[:, None]) & (position < high[:, None])
            scores = jnp.where(seen, scores / math.sqrt(dim), _LOWEST)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
            keep = jnp.exp(top - higher)
            added = jnp.einsum(
                "hqk,khd->hqd", weights.astype(value.dtype), values, precision=exact, preferred_element_type=jnp.float32
            )
            return out * keep[..., None] + added, higher, total * keep + jnp.sum(weights, axis=-1)

        start = (
            jnp.zeros((heads, block, dim), jnp.float32),
            jnp.full((heads, block), _LOWEST, jnp.float32),
            jnp.zeros((heads, block), jnp.float32),
        )
        out, _, total = lax.fori_loop(begin, stop, meet, start)
        return (out / jnp.where(total > 0, total, 1)[..., None]).swapaxes(0, 1).astype(value.dtype)

    blocks = (query.reshape(-1, block, heads, dim), first.reshape(-1, block), end.reshape(-1, block))
    return lax.map(one, blocks).reshape(tokens, heads, dim)
