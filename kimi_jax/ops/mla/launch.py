"""How the kernels of this folder are started, and the index arithmetic they share."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

TILE = 32
"""Cached rows per step: of 16 queries and 4 warps a tile of 64 needs all 512 registers."""

SMALLEST = 16
"""Least size of a side of a matrix product in a kernel."""


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    *operands: Any,
    interpret: bool,
    warps: int = 4,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """One kernel over whole arrays: every program addresses what it needs by itself.

    Operands may be trees; the kernel is called with trees of references.

    Args:
      stages: 2 reads the next tile of a loop while one is worked on; more is not safe with Triton for AMD.
      aliases: operand -> result that is written in its place.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        compiler_params=None if interpret else plt.CompilerParams(num_warps=warps, num_stages=stages),
    )(*operands)


def padded(size: int, least: int = SMALLEST) -> int:
    """The power of two that holds ``size``: kernels know no other sizes."""
    return max(least, pl.next_power_of_2(size))


def limit(size: int, tile: int | None = None) -> int | None:
    """``size`` where tiles of it reach past its end, None where they never do."""
    return None if size % (tile or padded(size)) == 0 else size


def span(start: Any, size: int) -> Any:
    """``size`` indices from ``start`` on."""
    return start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def load(ref: Any, *index: Any, limits: tuple[int | None, ...], where: Any = None, other: float = 0.0) -> Any:
    """The elements at broadcast ``index`` arrays; ``other`` outside of ``limits`` and wherever ``where`` is false.

    Args:
      limits: of each index: its size where a tile may reach past the end, None where it cannot.
    """
    mask = where
    for at, limit in zip(index, limits, strict=True):
        if limit is not None:
            mask = at < limit if mask is None else mask & (at < limit)
    at = ref.at[index]
    return plt.load(at) if mask is None else plt.load(at, mask=mask, other=jnp.asarray(other, ref.dtype))


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Product of two tiles over one axis of each, accumulated in float32; float32 operands are not narrowed."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


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
