"""One launch for the products of a few rows with several weights, each read once where it lies.

Programs are dealt to tiles of a few output channels over all weights in turn; a program reads its channels of one weight from
end to end, so nothing is split along the inner dimension and no partial sum is left over.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from kimi_jax.ops.linear.tile import Load, Tile, choose_tile, normed, plain
from kimi_jax.ops.linear.weights import Factor, Gated, arrays
from kimi_jax.ops.once import once
from kimi_jax.ops.situ.reference import situ

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
    interpret: bool,
) -> list[Float[Array, "rows _"]]:
    """Products of one input with every factor.

    Args:
      inputs: the rows, at most ``MOST_ROWS``, and for a norm its weight [1, columns]. Columns of the rows past those that the
        weights read are added to the first result after its rounding.
      left: put beside the first result, in the dtype of the result.
      dtypes: of the results.
      eps: of the norm that the rows go through first; None for none.

    Raises:
      ValueError: a weight cannot hold the rows' values, which meet it in its dtype.
    """
    rows, columns = inputs[0].shape
    prologue = plain if eps is None else partial(normed, eps=eps)
    matrices = [arrays(factor) for factor in factors]
    _check_dtypes(inputs[0].dtype, {weight.dtype for group in matrices for weight in group})
    widths, length = [group[0].shape[0] for group in matrices], matrices[0][0].shape[1]
    tile = choose_tile(rows, length, sum(weight.shape[0] for group in matrices for weight in group))
    tiles = [pl.cdiv(width, tile.channels) for width in widths]
    lefts, offset = ([], 0) if left is None else ([left], left.shape[1])
    block = pl.next_power_of_2(rows), COPIED // pl.next_power_of_2(rows)

    def kernel(*refs: Any) -> None:
        queue = list(refs)
        take = lambda count: [queue.pop(0) for _ in range(count)]  # noqa: E731
        given, moved, groups = take(len(inputs)), take(len(lefts)), [take(len(group)) for group in matrices]
        load = partial(prologue, *given, tile=tile)
        program, first = pl.program_id(0), 0
        for index, (factor, group, output, count) in enumerate(zip(factors, groups, queue, tiles, strict=True)):
            added = given[0] if index == 0 and columns > length else None
            at = 0 if index else offset
            mine = (program >= first) & (program < first + count)
            pl.when(mine)(partial(_tile, program - first, load, tile, factor, group, output, at, added))
            first += count
        for source in moved:
            pl.when(program >= first)(partial(_copy, program - first, source, queue[0], block))

    params = None if interpret else plt.CompilerParams(num_warps=tile.warps, num_stages=2)
    joined = [offset + widths[0], *widths[1:]]
    shapes = [jax.ShapeDtypeStruct((rows, width), dtype) for width, dtype in zip(joined, dtypes, strict=True)]
    grid = (sum(tiles) + pl.cdiv(offset, block[1]),)
    call = pl.pallas_call(
        kernel, grid=grid, out_shape=shapes, interpret=interpret, name="project", compiler_params=params
    )
    return call(*inputs, *lefts, *(weight for group in matrices for weight in group))


def _check_dtypes(rows: Any, weights: set[Any]) -> None:
    narrow = sorted(str(weight) for weight in weights if jnp.promote_types(rows, weight) != weight)
    if narrow:
        raise ValueError(
            f"linear: kernels multiply in the weight's dtype, which would round {rows} rows to {', '.join(narrow)}; what works: "
            f'rows in that dtype, weights in {rows}, or impl "reference", which cuts float32 rows into exact terms'
        )


def _tile(
    number: Any,
    load: Callable[[], Load],
    tile: Tile,
    factor: Factor,
    weights: Sequence[Any],
    output: Any,
    offset: int,
    added: Any,
) -> None:
    """One tile of one factor's result, which begins at column ``offset`` of the output."""
    rows, channels = output.shape[0], weights[0].shape[0]
    channel_c, row_r = number * tile.channels + jnp.arange(tile.channels), jnp.arange(1 if tile.by_row else tile.rows)
    reading_c = jnp.minimum(channel_c, channels - 1)
    out_rc, *up_rc = (_product(load(), weight, reading_c, tile).astype(output.dtype) for weight in weights)
    if isinstance(factor, Gated):
        out_rc = situ(out_rc, up_rc[0], factor.beta, factor.linear_beta)
    inside = (row_r < rows)[:, None] & (channel_c < channels)[None, :]
    if added is not None:
        out_rc += plt.load(added.at[row_r[:, None], tile.length + channel_c[None, :]], mask=inside, other=0)
    plt.store(output.at[row_r[:, None], offset + channel_c[None, :]], out_rc, mask=inside)


def _product(load: Load, weight: Any, channel_c: Any, tile: Tile) -> Any:
    """All rows times some channels of a weight, over the whole inner dimension; [rows, channels] float32."""

    def add(inner_k: Any, total: Any) -> Any:
        weight_ck = tile.load(weight, channel_c, inner_k)
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
    return jnp.sum(total, axis=1)[None, :] if tile.by_row else total


def _copy(number: Any, source: Any, output: Any, block: tuple[int, int]) -> None:
    """One block of columns to the start of the output's rows."""
    rows, columns = source.shape
    at = jnp.arange(block[0])[:, None], (number * block[1] + jnp.arange(block[1]))[None, :]
    inside = (at[0] < rows) & (at[1] < columns)
    plt.store(output.at[at], plt.load(source.at[at], mask=inside, other=0).astype(output.dtype), mask=inside)
