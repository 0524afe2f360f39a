"""How the products of a few rows are dealt to programs, and how a program reads its part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kimi_jax.ops.passes import over
from kimi_jax.quant.fp8 import E4M3, LARGEST, SMALLEST_SCALE

PROGRAMS = 512
"""Programs that keep 256 compute units busy: two on each, so that one computes while the other waits for memory."""

FEWEST = 16
"""Rows and channels of a matrix instruction, at least."""

Load = Callable[[Any], Any]
"""The input's values [rows, inner] at inner indices, zero past the end; rows past the end repeat the last."""


@dataclass(frozen=True)
class Tile:
    """What one program works on.

    Attributes:
      by_row: one row, summed on vector registers; else matrix instructions take all rows at once.
      rows: input rows, padded for matrix instructions. By row each channel reads the row for itself: the copy then lies where the
        channel's weights do, and never has to cross lanes.
      channels: output channels.
      length: the whole inner dimension.
      inner: inner elements of a pass.
      warps: of 64 lanes.
    """

    by_row: bool
    rows: int
    channels: int
    length: int
    inner: int
    warps: int

    def over(self, add: Callable[[Any, Any], Any], shape: tuple[int, int]) -> Any:
        """``add(inner indices, total)`` over the passes, from float32 zeros."""
        return over(self.length, self.inner, add, jnp.zeros(shape, jnp.float32), written_out=self.by_row)

    def load(self, ref: Any, row_r: Any, inner_k: Any, first: Any = None) -> Any:
        """Values at rows and inner indices, zero past the end; counted from column ``first`` on."""
        block = ref.at[row_r[:, None], (inner_k if first is None else first + inner_k)[None, :]]
        if self.length % self.inner == 0:
            return plt.load(block)
        return plt.load(block, mask=(inner_k < self.length)[None, :], other=jnp.asarray(0.0, ref.dtype))


def choose_tile(rows: int, length: int, channels: int) -> Tile:
    """The tile for ``rows`` x ``length`` inputs and ``channels`` output channels over all weights."""
    longest = pl.next_power_of_2(length)
    if rows > 1:
        # few channels: narrow products have no more than one program for a compute unit even so
        inner = 512 if rows <= FEWEST and length % 512 == 0 else min(256, max(FEWEST, longest))
        return Tile(False, max(FEWEST, pl.next_power_of_2(rows)), FEWEST, length, inner, 4)
    few = 4 if channels >= 4 * PROGRAMS else 2
    # a pass that divides the inner dimension needs no mask, and a load without one need not wait for a branch
    inner = next((size for size in (1024, 512, 256) if length % size == 0), min(1024, longest))
    return Tile(True, few, few, length, inner, max(1, min(4, few * inner // 512)))


def plain(x: Any, *, tile: Tile, first: Any = None) -> Load:
    """Rows as they are, from column ``first`` on."""
    row_r = jnp.zeros(tile.rows, jnp.int32) if tile.by_row else jnp.minimum(jnp.arange(tile.rows), x.shape[0] - 1)
    return lambda inner_k: tile.load(x, row_r, inner_k, first)


def normed(x: Any, scale: Any, *, tile: Tile, eps: float, whole: Tile | None = None, first: Any = None) -> Load:
    """Rows normalised and scaled, rounded as the reference does; every program computes their sizes anew.

    Args:
      whole: how the whole rows are read where the product takes only a part of them, from column ``first`` on.
    """
    whole = whole or tile
    entire, rows = plain(x, tile=whole), plain(x, tile=tile, first=first)

    def add(inner_k: Any, total_rk: Any) -> Any:
        part_rk = entire(inner_k).astype(jnp.float32)
        return total_rk + part_rk * part_rk

    squares_r = jnp.sum(whole.over(add, (whole.rows, whole.inner)), axis=1)
    size_r = jax.lax.rsqrt(squares_r / whole.length + eps)
    every_r = jnp.zeros(tile.rows, jnp.int32)

    def load(inner_k: Any) -> Any:
        normal_rk = (rows(inner_k).astype(jnp.float32) * size_r[:, None]).astype(x.dtype)
        return normal_rk * tile.load(scale, every_r, inner_k, first).astype(x.dtype)

    return load


def rounded(load: Load, tile: Tile) -> tuple[Load, Any]:
    """One row rounded to FP8 (``quant/fp8``) with its scale [rows]; every program finds the largest value anew."""

    def most(inner_k: Any, top_rk: Any) -> Any:
        return jnp.maximum(top_rk, jnp.abs(load(inner_k).astype(jnp.float32)))

    top_r = jnp.max(tile.over(most, (tile.rows, tile.inner)), axis=1)
    scale_r = jnp.maximum(top_r / LARGEST, SMALLEST_SCALE)
    return lambda inner_k: (load(inner_k).astype(jnp.float32) / scale_r[:, None]).astype(E4M3), scale_r
