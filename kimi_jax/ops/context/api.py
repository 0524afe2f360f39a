"""Latent attention and its indexer over a sequence that a layout may cut (named axis ``sequence``): same meaning either way.

The devices that share a sequence are devices that share the heads. With few queries, those of all heads are gathered, each device
attends to the rows that it holds, and the parts are joined. With many, the rows are fewer bytes than the queries, and are gathered.
Every device of a group makes the same calls whatever it holds. Source: K3.1 Pro notes, section 8.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kimi_jax.ops.chunks import by_chunks
from kimi_jax.ops.context import merge
from kimi_jax.ops.context.ownership import Dealt, own_columns, own_rows
from kimi_jax.ops.context.rows import gather_rows
from kimi_jax.ops.indexer import api as indexer
from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla import api as mla
from kimi_jax.ops.mla import sparse
from kimi_jax.ops.mla.values import values
from kimi_jax.placement.collectives import Parallel


def dealt(parallel: Parallel) -> Dealt:
    """How the layout deals the positions of a sequence."""
    return Dealt(parallel.size("sequence"), parallel.interleave)


def own(
    new: Shaped[Array, "rows tokens ..."], starts: Int[Array, " rows"], counts: Int[Array, " rows"], parallel: Parallel
) -> tuple[Shaped[Array, "rows most ..."], Int[Array, " rows"], Int[Array, " rows"]]:
    """What this device keeps of new tokens, its first column and its number of rows; arguments as for ``write_rows``."""
    if parallel.size("sequence") == 1:
        return new, starts, counts
    return own_rows(new, starts, counts, dealt(parallel), parallel.index("sequence"))


def attend(
    query: mla.Query,
    cache: Float[Array, "pool page row_dim"],
    expand: Matrix,
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    parallel: Parallel,
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    come: bool = False,
) -> Float[Array, "rows tokens heads value_dim"]:
    """``mla.attend``, where ``cache`` is what this device holds; positions and lengths are those of the whole sequence.

    ``come``: the devices that share the sequence ask for other tokens each, so that the rows must come to the queries.
    """
    if parallel.size("sequence") == 1:
        return mla.attend(
            query, cache, expand, positions, lengths, nope_dim=nope_dim, gate=gate, pages=pages, impl=impl
        )
    rule, rank = dealt(parallel), parallel.index("sequence")
    if come or query.shape[1] >= mla.DIRECT_FROM:
        rows = gather_rows(cache, lengths, rule, parallel, pages)
        return mla.attend(query, rows, expand, positions, lengths, nope_dim=nope_dim, gate=gate, impl=impl)
    part = mla.attend_partial(
        _of_all_heads(query, expand, nope_dim, parallel, impl),
        cache,
        rule.last(positions, rank),
        rule.held(lengths, rank),
        latent=expand.shape[1],
        scale=mla.scale_of(query, expand, nope_dim),
        pages=pages,
        impl=impl,
    )
    return values(_joined(*part, parallel), expand, nope_dim=nope_dim, gate=gate, impl=impl)


def attend_selected(
    query: mla.Query,
    cache: Float[Array, "pool page row_dim"],
    expand: Matrix,
    selected: Int[Array, "rows tokens k"],
    lengths: Int[Array, " rows"],
    parallel: Parallel,
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    come: bool = False,
) -> Float[Array, "rows tokens heads value_dim"]:
    """``sparse.attend_selected``, where ``cache`` is what this device holds; ``selected`` are positions of the whole sequence.

    ``come``: as for :func:`attend`.
    """
    if parallel.size("sequence") == 1:
        return sparse.attend_selected(
            query, cache, expand, selected, nope_dim=nope_dim, gate=gate, pages=pages, impl=impl
        )
    rule, rank = dealt(parallel), parallel.index("sequence")
    if come or query.shape[1] >= mla.DIRECT_FROM:
        rows = gather_rows(cache, lengths, rule, parallel, pages)
        return sparse.attend_selected(query, rows, expand, selected, nope_dim=nope_dim, gate=gate, impl=impl)
    part = sparse.attend_selected_partial(
        _of_all_heads(query, expand, nope_dim, parallel, impl),
        cache,
        own_columns(selected, rule, rank),
        latent_dim=expand.shape[1],
        scale=mla.scale_of(query, expand, nope_dim),
        pages=pages,
        impl=impl,
    )
    return values(_joined(*part, parallel), expand, nope_dim=nope_dim, gate=gate, impl=impl)


def select(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    parallel: Parallel,
    *,
    k: int,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    budget: int = indexer.BYTES,
) -> Int[Array, "rows tokens k"]:
    """``indexer.select``, where ``index`` is what this device holds: the same positions on every device, those of one device.

    A token among the best ``k`` of all is among the best ``k`` of its device, so that each hands in ``k`` candidates.
    """
    if parallel.size("sequence") == 1:
        return indexer.select(q, w, index, positions, k=k, pages=pages, impl=impl, budget=budget)
    rule, rank = dealt(parallel), parallel.index("sequence")
    rows, room = positions.shape[0], index.keys.shape[1] * (1 if pages is None else pages.shape[1])

    def some(given: tuple[Array, Array, Array]) -> Array:
        q, w, positions = given
        scores = indexer.scores(q, w, index, rule.last(positions, rank), pages, impl)
        score, position = merge.candidates(scores, indexer.top_k(scores, k, impl), rule, rank)
        # as one array of 32-bit numbers: one collective
        sent = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), position])
        came = jnp.moveaxis(parallel.stacked(sent, "sequence"), 0, -2)
        bits, position = came.reshape(*came.shape[:-2], -1)
        return merge.selection(lax.bitcast_convert_type(bits, jnp.float32), position, k, impl)

    with jax.named_scope("context_select"):
        held = 4 * rows * (room + 4 * k * rule.parts)  # scores, and every device's candidates on the way through a sort
        return by_chunks(some, (q, w, positions), (0, 0, -1), max(1, budget // held))


def gather_keys(
    index: IndexCache,
    lengths: Int[Array, " rows"],
    parallel: Parallel,
    pages: Int[Array, "rows pages"] | None = None,
) -> IndexCache:
    """The index keys of every sequence in the order of positions, from what the devices that share it hold; without pages."""

    def whole(held: Shaped[Array, "pool page ..."]) -> Shaped[Array, "rows room ..."]:
        found = gather_rows(held.reshape(*held.shape[:2], -1), lengths, dealt(parallel), parallel, pages)
        return found.reshape(*found.shape[:2], *held.shape[2:])

    return jax.tree.map(whole, index)


def _of_all_heads(
    query: mla.Query, expand: Matrix, nope_dim: int, parallel: Parallel, impl: str
) -> Float[Array, "rows tokens all_heads row_dim"]:
    """Absorbed queries of the heads of all devices that share the sequence."""
    moved = isinstance(query, mla.Absorbed)
    absorbed = query.rows if moved else mla.absorb(query, expand, nope_dim=nope_dim, impl=impl)
    return parallel.gather_among(absorbed, "sequence", "heads", 2)


def _joined(
    value: Float[Array, "rows tokens all_heads latent"], log: Float[Array, "rows tokens all_heads"], parallel: Parallel
) -> Float[Array, "rows tokens heads latent"]:
    """Attention of this device's heads over the whole sequence, from every device's attention of all heads over its part."""
    with jax.named_scope("context_join"):
        whole = merge.log_sum(parallel.stacked(log, "sequence"))
        share = value * merge.share(log, whole)[..., None]
        return parallel.scatter_among(share, "sequence", "heads", 2)
