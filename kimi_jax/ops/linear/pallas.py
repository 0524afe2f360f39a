"""One launch for the products of a few rows with several weights, each read once where it lies.

Programs are dealt to tiles of a few output channels over all weights in turn; a program reads its channels of one weight from
end to end, so nothing is split along the inner dimension and no partial sum is left over.

FP8 weights meet rows rounded to FP8. One row is rounded by every program for itself, which saves a launch; more rows are rounded
once before the launch, which then reads half the bytes of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from kimi_jax.ops import norm
from kimi_jax.ops.linear.tile import Load, Tile, choose_tile, normed, plain, rounded
from kimi_jax.ops.linear.weights import Factor, Gated, Scaled, matrices
from kimi_jax.ops.once import once
from kimi_jax.ops.situ.reference import situ
from kimi_jax.quant import fp8

MOST_ROWS = 64
"""Rows that the kernel takes: above it every weight byte is used often enough for XLA's own products."""

COPIED = 4096
"""Values that a program moves."""


@once
def project(
    inputs: Sequence[Array],
    factors: Sequence[Factor],
    left: Float[Array, "rows left"] | None = None,
    *,
    dtypes: tuple[Any, ...],
    eps: float | None = None,
    words: bool = False,
    interpret: bool,
) -> list[Float[Array, "rows _"]]:
    """Products of one input with every factor.

    Args:
      inputs: the rows, at most ``MOST_ROWS``, and for a norm its weight [1, columns]. Columns of the rows past those that the
        weights read are added to the first result after its rounding.
      left: put beside the first result, in the dtype of the result.
      dtypes: of the results.
      eps: of the norm that the rows go through first; None for none.
      words: whether the first two results become one array of 16-bit words beside each other (``api.project_words``).

    Raises:
      ValueError: a weight cannot hold the rows' values, which meet it in its dtype.
    """
    rows, columns = inputs[0].shape
    prologue = plain if eps is None else partial(normed, eps=eps)
    groups = [matrices(factor) for factor in factors]
    flat = [matrix for group in groups for matrix in group]
    check_dtypes(inputs[0].dtype, {matrix.dtype for matrix in flat if not isinstance(matrix, Scaled)})
    widths, length = [group[0].shape[0] for group in groups], groups[0][0].shape[1]
    tile = choose_tile(rows, length, sum(matrix.shape[0] for matrix in flat))
    tiles = [pl.cdiv(width, tile.channels) for width in widths]
    offset = 0 if left is None else left.shape[1]
    block = pl.next_power_of_2(rows), COPIED // pl.next_power_of_2(rows)
    narrow = None
    if not tile.by_row and any(isinstance(matrix, Scaled) for matrix in flat):
        narrow = fp8.quantise(_prepared(inputs, length, eps))

    def kernel(given: Any, narrow: Any, moved: Any, groups: Any, *outputs: Any) -> None:
        load = partial(prologue, *given, tile=tile)
        program, first = pl.program_id(0), 0
        filled = [outputs[0], *outputs] if words else outputs
        for index, (factor, group, output, count) in enumerate(zip(factors, groups, filled, tiles, strict=True)):
            added = given[0] if index == 0 and columns > length else None
            place = _Place(output, starts[index], dtypes[index])
            mine = (program >= first) & (program < first + count)
            pl.when(mine)(partial(_tile, program - first, load, narrow, tile, factor, group, place, added))
            first += count
        if moved is not None:
            pl.when(program >= first)(partial(_copy, program - first, moved, outputs[0], block))

    params = None if interpret else plt.CompilerParams(num_warps=tile.warps, num_stages=2)
    starts, joined, kinds = [offset] + [0] * (len(widths) - 1), [offset + widths[0], *widths[1:]], list(dtypes)
    if words:
        sizes = [width * dtype.itemsize // 2 for width, dtype in zip(widths, dtypes, strict=True)]
        starts[1], joined[:2], kinds[:2] = sizes[0], [sum(sizes[:2])], [jnp.uint16]
    shapes = [jax.ShapeDtypeStruct((rows, width), kind) for width, kind in zip(joined, kinds, strict=True)]
    grid = (sum(tiles) + pl.cdiv(offset, block[1]),)
    call = pl.pallas_call(
        kernel, grid=grid, out_shape=shapes, interpret=interpret, name="project", compiler_params=params
    )
    return call(list(inputs), narrow, left, groups)


def _prepared(inputs: Sequence[Array], length: int, eps: float | None) -> Array:
    """The rows as the weights read them."""
    rows = inputs[0][:, :length]
    return rows if eps is None else norm.rms_norm(rows, inputs[1][0], eps)


def check_dtypes(rows: Any, weights: set[Any]) -> None:
    """Raises ``ValueError`` where a weight cannot hold the rows' values, which meet it in its dtype."""
    narrow = sorted(str(weight) for weight in weights if jnp.promote_types(rows, weight) != weight)
    if narrow:
        raise ValueError(
            f"linear: kernels multiply in the weight's dtype, which would round {rows} rows to {', '.join(narrow)}; what works: "
            f'rows in that dtype, weights in {rows}, or impl "reference", which cuts float32 rows into exact terms'
        )


def _tile(
    number: Any,
    load: Callable[[], Load],
    narrow: Any,
    tile: Tile,
    factor: Factor,
    weights: Sequence[Any],
    place: "_Place",
    added: Any,
) -> None:
    """One tile of one factor's result."""
    rows, channels = place.output.shape[0], weights[0].shape[0]
    channel_c, row_r = number * tile.channels + jnp.arange(tile.channels), jnp.arange(1 if tile.by_row else tile.rows)
    reading_c = jnp.minimum(channel_c, channels - 1)
    if isinstance(weights[0], Scaled):
        values, scale_r = _narrow(load, narrow, tile)
    else:
        values, scale_r = load(), None
    out_rc, *up_rc = (product(values, scale_r, weight, reading_c, tile).astype(place.dtype) for weight in weights)
    if isinstance(factor, Gated):
        out_rc = situ(out_rc, up_rc[0], factor.beta, factor.linear_beta)
    inside = (row_r < rows)[:, None] & (channel_c < channels)[None, :]
    if added is not None:
        out_rc += plt.load(added.at[row_r[:, None], tile.length + channel_c[None, :]], mask=inside, other=0)
    place.store(row_r[:, None], channel_c[None, :], out_rc, inside)


class _Place(NamedTuple):
    """Where a result goes: from column ``start`` of an output on, which holds words where their dtype is not its own."""

    output: Any
    start: int
    dtype: Any

    def store(self, row: Any, channel: Any, values: Any, inside: Any) -> None:
        if self.output.dtype == self.dtype:
            plt.store(self.output.at[row, self.start + channel], values, mask=inside)
        elif jnp.dtype(self.dtype).itemsize == 2:
            bits = jax.lax.bitcast_convert_type(values, jnp.uint16)
            plt.store(self.output.at[row, self.start + channel], bits, mask=inside)
        else:  # low half first
            bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
            for half, word in enumerate((bits & 0xFFFF, bits >> 16)):
                at = self.output.at[row, self.start + 2 * channel + half]
                plt.store(at, word.astype(jnp.uint16), mask=inside)


def _narrow(load: Callable[[], Load], narrow: Any, tile: Tile) -> tuple[Load, Any]:
    """The rows in FP8 and their scales: rounded before the launch, or here."""
    if narrow is None:
        return rounded(load(), tile)
    codes, scales = narrow
    return plain(codes, tile=tile), scales[jnp.minimum(jnp.arange(tile.rows), scales.shape[0] - 1)]


def product(load: Load, scale_r: Any, weight: Any, channel_c: Any, tile: Tile) -> Any:
    """All rows times some channels of a weight, over the whole inner dimension; [rows, channels] float32."""
    stored = weight.codes if isinstance(weight, Scaled) else weight

    def add(inner_k: Any, total: Any) -> Any:
        weight_ck = tile.load(stored, channel_c, inner_k)
        input_rk = load(inner_k).astype(weight_ck.dtype)
        if tile.by_row:
            return total + weight_ck.astype(jnp.float32) * input_rk.astype(jnp.float32)
        return total + jax.lax.dot_general(
            input_rk,
            weight_ck,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if weight_ck.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    total = tile.over(add, (tile.channels, tile.inner) if tile.by_row else (tile.rows, tile.channels))
    if tile.by_row:
        out_c = jnp.sum(total, axis=1)
        return (out_c * scale_r * weight.scale[channel_c] if isinstance(weight, Scaled) else out_c)[None, :]
    return total * scale_r[:, None] * weight.scale[channel_c][None, :] if isinstance(weight, Scaled) else total


def _copy(number: Any, source: Any, output: Any, block: tuple[int, int]) -> None:
    """One block of columns to the start of the output's rows."""
    rows, columns = source.shape
    at = jnp.arange(block[0])[:, None], (number * block[1] + jnp.arange(block[1]))[None, :]
    inside = (at[0] < rows) & (at[1] < columns)
    plt.store(output.at[at], plt.load(source.at[at], mask=inside, other=0).astype(output.dtype), mask=inside)
