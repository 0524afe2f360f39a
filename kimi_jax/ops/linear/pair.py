"""One launch for the sum of two products: of a part of a normalised row, and of another row, each with a weight of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.pallas import check_dtypes, product
from kimi_jax.ops.linear.tile import choose_tile, normed, plain
from kimi_jax.ops.once import once


@once
def project_pair(
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"],
    first: Int[Array, " one"],
    weight: Float[Array, "out part"],
    y: Float[Array, "rows in"],
    other: Float[Array, "out in"],
    *,
    eps: float,
    interpret: bool,
) -> Float[Array, "rows out"]:
    """See ``api.project_pair``; at most ``pallas.MOST_ROWS`` rows."""
    check_dtypes(x.dtype, {weight.dtype, other.dtype})
    rows, channels = x.shape[0], weight.shape[0]
    tile, beside = (choose_tile(rows, matrix.shape[1], channels) for matrix in (weight, other))
    whole = choose_tile(rows, x.shape[1], channels)

    def kernel(
        x_ref: Any, scale_ref: Any, first_ref: Any, weight_ref: Any, y_ref: Any, other_ref: Any, out_ref: Any
    ) -> None:
        channel_c = pl.program_id(0) * tile.channels + jnp.arange(tile.channels)
        reading_c = jnp.minimum(channel_c, channels - 1)
        part = normed(x_ref, scale_ref, tile=tile, eps=eps, whole=whole, first=first_ref[0])
        out_rc = product(part, None, weight_ref, reading_c, tile).astype(out_ref.dtype)
        out_rc += product(plain(y_ref, tile=beside), None, other_ref, reading_c, beside).astype(out_ref.dtype)
        row_r = jnp.arange(1 if tile.by_row else tile.rows)
        inside = (row_r < rows)[:, None] & (channel_c < channels)[None, :]
        plt.store(out_ref.at[row_r[:, None], channel_c[None, :]], out_rc, mask=inside)

    warps = max(tile.warps, beside.warps)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(channels, tile.channels),),
        out_shape=jax.ShapeDtypeStruct((rows, channels), x.dtype),
        interpret=interpret,
        name="project_pair",
        compiler_params=None if interpret else plt.CompilerParams(num_warps=warps, num_stages=2),
    )(x, scale[None], first, weight, y, other)
