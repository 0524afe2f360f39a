"""The cached rows of all devices that share a sequence, in the order of positions: what a long prefill call attends to."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from kimi_jax.ops.context.ownership import Dealt, in_order
from kimi_jax.placement.collectives import Parallel

BLOCK = 16384
"""Positions that one collective brings: 9 MB of K3's rows of one byte an entry."""


def gather_rows(
    cache: Shaped[Array, "pool page row_dim"],
    lengths: Int[Array, " rows"],
    dealt: Dealt,
    parallel: Parallel,
    pages: Int[Array, "rows pages"] | None = None,
) -> Shaped[Array, "rows room row_dim"]:
    """Rows of every sequence up to the longest of ``lengths`` or a little further; zeros after that.

    The number of collectives follows the longest sequence, which all devices of the group know alike.

    Args:
      cache: what this device holds, [rows, columns, row_dim], or a pool of pages with a table ``pages``.
      lengths: written rows of each sequence, on all devices together.
    """
    page, width = cache.shape[1:]
    rows, room = lengths.shape[0], page * (1 if pages is None else pages.shape[1])
    # whole runs, and whole pages, which hold whole runs
    unit = dealt.run if pages is None else page
    size = min(max(1, BLOCK // dealt.turn * dealt.run // unit) * unit, room)
    # as bytes where an entry is one: not every backend moves eight-bit floats
    held = lax.bitcast_convert_type(cache, jnp.uint8) if cache.dtype.itemsize == 1 else cache

    def step(turn: Int[Array, ""], out: Shaped[Array, "rows room row_dim"]) -> Shaped[Array, "rows room row_dim"]:
        # the last block is shifted back when the room is no multiple of it; what it brings again is the same
        start = jnp.minimum(turn * size, room - size)
        joined = parallel.stacked(_read(held, pages, start, size), "sequence")
        block = in_order(jnp.swapaxes(joined, 0, 1), dealt)
        return lax.dynamic_update_slice(out, block, (0, start * dealt.parts, 0))

    empty = jnp.zeros((rows, room * dealt.parts, width), held.dtype)
    with jax.named_scope("context_rows"):
        trips = -(-jnp.max(lengths, initial=0) // (size * dealt.parts))
        found = lax.fori_loop(0, jnp.minimum(trips, math.ceil(room / size)), step, empty)
    return lax.bitcast_convert_type(found, cache.dtype) if held.dtype != cache.dtype else found


def _read(
    held: Shaped[Array, "pool page row_dim"], pages: Int[Array, "rows pages"] | None, start: Int[Array, ""], size: int
) -> Shaped[Array, "rows size row_dim"]:
    """``size`` columns of every sequence from ``start`` on."""
    if pages is None:
        return lax.dynamic_slice_in_dim(held, start, size, axis=1)
    page = held.shape[1]
    some = lax.dynamic_slice_in_dim(pages, start // page, size // page, axis=1)
    return held[some].reshape(pages.shape[0], size, held.shape[2])
