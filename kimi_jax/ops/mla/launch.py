"""What the kernels of this folder demand of a cache, and how they find a row in it."""

from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.ops.launch import SMALLEST as SMALLEST
from kimi_jax.ops.launch import dot as dot
from kimi_jax.ops.launch import launch as launch
from kimi_jax.ops.launch import limit as limit
from kimi_jax.ops.launch import load as load
from kimi_jax.ops.launch import padded as padded
from kimi_jax.ops.launch import span as span

TILE = 32
"""Cached rows per step: of 16 queries and 4 warps a tile of 64 needs all 512 registers."""


def check_cache(cache: Any, pages: Any, what: str = "a latent cache") -> None:
    """What kernels demand of a cache.

    Raises:
      ValueError: a page that does not hold whole tiles; a size at which 32-bit offsets turn negative.
    """
    if pages is not None and cache.shape[1] % TILE:
        raise ValueError(
            f"pages of {cache.shape[1]} rows do not hold whole tiles of {TILE}; nearest that works: "
            f"{max(1, round(cache.shape[1] / TILE)) * TILE}"
        )
    # the Triton lowering counts bytes but offsets are elements with a sign: only one-byte elements can fall between
    if cache.dtype.itemsize == 1 and 1 << 31 < cache.size <= 1 << 32:
        held = cache.size // cache.shape[0]
        raise ValueError(
            f"{what} of {cache.size} one-byte elements on a device lies between 2^31 and 2^32, where kernel offsets "
            f"overflow; nearest that works: {(1 << 31) // held} or {(1 << 32) // held + 1} of {cache.shape[0]} sequences or pages, "
            "or bfloat16"
        )


def capacity(cache: Any, pages: Any) -> int:
    """Rows that each sequence can hold."""
    return cache.shape[1] * (1 if pages is None else pages.shape[1])


def locate(pages_ref: Any, row: Any, position: Any, page: int) -> tuple[Any, Any]:
    """Where position ``position`` of sequence ``row`` lies in the cache, inside a kernel: page and row of it."""
    # without a table nothing has to be read before the row itself
    if pages_ref is None:
        return row, position
    page = jnp.int32(page)
    return pages_ref[row, jax.lax.div(position, page)], jax.lax.rem(position, page)


def locate_each(pages_ref: Any, row: Any, position: Any, page: int, where: Any) -> tuple[Any, Any]:
    """The same for an array of positions, which may lie in different pages; the table is read only at ``where``."""
    if pages_ref is None:
        return jnp.full_like(position, row), position
    page_size = jnp.full_like(position, page)
    table = load(pages_ref, row, jax.lax.div(position, page_size), limits=(None, None), where=where, other=0)
    return table, jax.lax.rem(position, page_size)
