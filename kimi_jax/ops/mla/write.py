"""New rows into the latent cache, in place: with the norm of the latent and the rounding to the cache's dtype.

One launch of its own here; ``absorb`` writes the same rows beside its own work.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mla.launch import capacity, check_cache, launch, limit, load, locate, padded, span
from kimi_jax.ops.once import once


class NewRows(NamedTuple):
    """Rows on their way into a cache, as ``cache.write_rows`` takes them.

    Attributes:
      values: of the new tokens.
      starts: position of the first of each sequence.
      counts: how many of each are stored.
      norm: weight of the norm of the latent; None where the rows are stored as they come.
    """

    values: Float[Array, "rows tokens row_dim"]
    starts: Int[Array, " rows"]
    counts: Int[Array, " rows"]
    norm: Float[Array, " latent"] | None


@once
def write(
    cache: Float[Array, "pool page row_dim"],
    new: Float[Array, "rows tokens row_dim"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    norm: Float[Array, " latent"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    eps: float = 0.0,
    interpret: bool = False,
) -> Float[Array, "pool page row_dim"]:
    """See ``cache.write_rows``; ``norm`` is its weight, ``eps`` added to the mean square."""
    check_cache(cache, pages)
    rows, tokens, _ = new.shape

    def kernel(cache_ref: Any, new_refs: NewRows, pages_ref: Any, out_ref: Any) -> None:
        del cache_ref  # the result lies in its place
        store_row(out_ref, new_refs, pages_ref, pl.program_id(1), pl.program_id(0), capacity(cache, pages), eps)

    return launch(
        kernel,
        "mla_write",
        (tokens, rows),
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        cache,
        NewRows(new, starts, counts, norm),
        pages,
        interpret=interpret,
        warps=1,
        aliases={0: 0},
    )


def store_row(out_ref: Any, new: NewRows, pages_ref: Any, row: Any, token: Any, room: int, eps: float) -> None:
    """Puts one row in its place inside a kernel, unless it is padding or lies past ``room``; ``new`` holds references."""
    row_dim = new.values.shape[-1]
    latent = row_dim if new.norm is None else new.norm.shape[0]
    position = new.starts[row] + token

    @pl.when((token < new.counts[row]) & (position < room))
    def _() -> None:
        at = locate(pages_ref, row, position, out_ref.shape[1])

        def store(start: int, end: int, weigh: Any) -> None:
            c = start + span(0, padded(end - start))
            new_c = load(new.values, row, token, c, limits=(None, None, limit(end - start) and end))
            plt.store(out_ref.at[*at, c], narrow(weigh(new_c), out_ref.dtype), mask=c < end)

        store(0, latent, normed(new.norm, eps) if new.norm is not None else lambda new_r: new_r)
        if latent < row_dim:
            store(latent, row_dim, lambda new_k: new_k)


def normed(weight_ref: Any, eps: float) -> Any:
    """``ops.norm.rms_norm`` of one row, inside a kernel."""
    width = weight_ref.shape[0]

    def weigh(new_r: Any) -> Any:
        wide_r = new_r.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(wide_r * wide_r) / width + eps)
        weight_r = load(weight_ref, span(0, padded(width)), limits=(limit(width),))
        return (wide_r * scale).astype(new_r.dtype) * weight_r.astype(new_r.dtype)

    return weigh


def narrow(x: Any, dtype: Any) -> Any:
    """``x`` rounded to a cache's dtype; eight bits saturate."""
    if dtype == jnp.float8_e4m3fn:
        most = float(jnp.finfo(dtype).max)
        x = x.astype(jnp.float32)
        # comparisons instead of a clip: not a number stays what it is
        x = jnp.where(x > most, most, jnp.where(x < -most, -most, x))
    return x.astype(dtype)
