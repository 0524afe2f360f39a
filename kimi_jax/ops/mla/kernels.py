"""Latent attention out of the kernels of this folder.

Absorbed, a call is three launches: the queries are moved into the coordinates of a cached row (``absorb``), every share of the rows
is attended to (``split``), and the shares are joined, moved to values and gated (``merge``). Direct, it is two launches per block
of cached rows (``prefill``) and one that divides and gates.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla import prefill, split
from kimi_jax.ops.mla.absorb import Absorbed, Query, moved, scale_of
from kimi_jax.ops.mla.launch import capacity
from kimi_jax.ops.mla.merge import merge, merge_expanded
from kimi_jax.ops.mla.reference import gated
from kimi_jax.ops.once import once


@once
def attend(
    query: Query,
    cache: Float[Array, "pool page row_dim"],
    expand: Matrix,
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    nope_dim: int,
    absorbed: bool,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads value_dim"]:
    """See ``api.attend``."""
    if not absorbed:
        assert not isinstance(query, Absorbed)
        # what no query reads is not expanded either: an idle row may hold a long sequence
        read = jnp.clip(jnp.max(positions, axis=1) + 1, 0, lengths)
        cached = prefill.Cached(cache, pages, read)
        out = prefill.attend(query, cached, expand, positions, nope_dim=nope_dim, interpret=interpret)
        return out if gate is None else gated(out, gate)
    shares = split.attend(
        moved(query, expand, nope_dim=nope_dim, interpret=interpret),
        cache,
        positions,
        lengths,
        pages,
        latent=expand.shape[1],
        scale=scale_of(query, expand, nope_dim),
        interpret=interpret,
    )
    return merge_expanded(
        shares,
        lengths,
        expand,
        gate,
        tokens=query.shape[1],
        capacity=capacity(cache, pages),
        nope_dim=nope_dim,
        interpret=interpret,
    )


@once
def attend_partial(
    query: Float[Array, "rows tokens heads row_dim"],
    cache: Float[Array, "pool page row_dim"],
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    pages: Int[Array, "rows pages"] | None = None,
    *,
    latent: int,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """See ``api.attend_partial``."""
    shares = split.attend(query, cache, positions, lengths, pages, latent=latent, scale=scale, interpret=interpret)
    return merge(shares, lengths, tokens=query.shape[1], capacity=capacity(cache, pages), interpret=interpret)
