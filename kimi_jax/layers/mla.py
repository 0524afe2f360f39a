"""Gated latent attention without positions (text-model section 3.2), over chosen rows where there is an indexer (K3.1 Pro)."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.lax import cond
from jaxtyping import Array, Float, Int

from kimi_jax.cache import MlaCache, write_keys, write_rows
from kimi_jax.config import LATENT_EPS, KimiConfig
from kimi_jax.layers.indexer import Indexer
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.ops.context import api as context
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.mla import api as mla_op
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision


class Mla(nnx.Module):
    """One latent-attention sub-layer; heads are split, the cached rows are shared by all heads."""

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        mla, hidden = config.mla, config.hidden
        heads, values = mla.heads, mla.heads * mla.value_dim
        self.q_a_proj = Linear(mla.q_rank, hidden, ("q_lora", "embed"), precision)
        self.q_a_layernorm = RmsNorm(mla.q_rank, LATENT_EPS, precision)
        self.q_b_proj = Linear(heads * mla.query_dim, mla.q_rank, ("heads", None), precision, (heads, mla.q_rank))
        # one unit: the latent and the shared key are cut only together
        self.kv_a_proj_with_mqa = Linear(mla.row_dim, hidden, ("kv_lora", "embed"), precision, (1, hidden))
        self.kv_a_layernorm = RmsNorm(mla.kv_rank, LATENT_EPS, precision)
        expanded = heads * (mla.nope_dim + mla.value_dim)
        # read head by head inside the attention, never as a projection
        by_head = replace(precision, projection=precision.operand)
        self.kv_b_proj = Linear(expanded, mla.kv_rank, ("heads", None), by_head, (heads, mla.kv_rank))
        self.g_proj = Linear(values, hidden, ("heads", "embed"), precision, (heads, hidden))
        self.o_proj = Linear(hidden, values, ("embed", "heads"), precision, (hidden, heads))
        if config.indexer is not None:
            self.indexer = Indexer(config, precision, parallel, impls)
        self.sizes = mla
        self.parallel, self.impls = parallel, impls

    def __call__(
        self,
        x: Float[Array, "rows tokens embed"],
        positions: Int[Array, "rows tokens"],
        new: Int[Array, " rows"],
        lengths: Int[Array, " rows"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None = None,
        *,
        cut: bool = False,
    ) -> tuple[Float[Array, "rows tokens embed"], MlaCache]:
        """Writes the rows of these tokens, then attends to all rows, or to those that the indexer chooses.

        Args:
          positions: position of each token, negative for padding.
          new: real tokens of each row.
          lengths: written rows per sequence once these tokens are in.
          pages: where the rows of each sequence lie when the cache is a pool.
          cut: whether ``x`` is this device's share of the call (``layers/share``); ``new`` and ``lengths`` are of the whole.
        """
        sizes, impl = self.sizes, self.impls.linear
        readers = (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)
        query_latent, row, gate = linear_op.project_many(x, [reader.factor for reader in readers], impl=impl)
        query_latent = self.parallel.all_gather(query_latent, "q_lora", -1)
        norm, expand = self.q_a_layernorm, self.q_b_proj
        if not cut and mla_op.enters(query_latent, expand.factor, self.impls.mla):
            query = mla_op.Latents(query_latent, norm.weight[...], expand.factor)
        else:
            query = linear_op.project_normed(query_latent, norm.weight[...], norm.eps, expand.factor, impl)
            query = query.reshape(*x.shape[:2], -1, sizes.query_dim)
        read = self.indexer.read(x) if hasattr(self, "indexer") else None
        keys = None if read is None else read[0]
        if cut:  # all new rows, of which every device writes what it is to hold
            row = self.parallel.all_gather(row, "tokens", 1)
            keys = None if keys is None else self.parallel.all_gather(keys, "tokens", 1)
        # where devices that share the sequence have other tokens each, what is cached comes to the queries
        come = cut and self.parallel.common("sequence", "tokens") > 1
        query, cache = self._write(query, row, keys, lengths - new, new, cache, pages)
        gate = gate.reshape(*x.shape[:2], -1, sizes.value_dim)

        def dense() -> Float[Array, "rows tokens heads value_dim"]:
            return self._attend(query, gate, positions, lengths, cache, pages, come=come)

        def sparse() -> Float[Array, "rows tokens heads value_dim"]:
            assert read is not None
            asked, held = (query_latent, read[1], positions), (cache, pages)
            selected = self._select_here(*asked, lengths, *held) if come else self._select(*asked, *held)
            return self._attend_selected(query, gate, selected, lengths, cache, pages, come=come)

        parts = self.parallel.size("sequence")
        room = cache.latent.shape[1] * (1 if pages is None else pages.shape[1]) * parts
        if read is None or room <= self.indexer.sizes.top_k:
            out = dense()
        elif self.impls.mla != "reference" or parts > 1:
            # a GPU would read the condition below back to the host in the middle of a step, and no collective may lie behind it
            out = sparse()
        else:  # up to top_k tokens the choice is everything, and dense is cheaper
            out = cond(jnp.max(lengths, initial=0) <= self.indexer.sizes.top_k, dense, sparse)
        out = self.o_proj(out.reshape(*x.shape[:2], -1), impl=impl)
        return self.parallel.psum(out, "heads"), cache

    def _write(
        self,
        query: Float[Array, "rows tokens heads query_dim"] | mla_op.Latents,
        row: Float[Array, "rows tokens row_dim"],
        keys: Float[Array, "rows tokens width"] | None,
        starts: Int[Array, " rows"],
        new: Int[Array, " rows"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None,
    ) -> tuple[mla_op.Query, MlaCache]:
        """The cache with the rows of these tokens, and with their index keys whether or not this call chooses: later ones may.

        The queries come back absorbed where a launch does both, and projected before where it does that too.
        """
        norm, impl = self.kv_a_layernorm, self.impls.mla
        # a call that is cut brings more new rows than queries
        early = row.shape[1] == query.shape[1] and mla_op.absorbs_early(query.shape[1], impl)
        row, first, count = context.own(row, starts, new, self.parallel)
        rows, expand, nope_dim = (
            mla_op.NewRows(row, first, count, norm.weight[...]),
            self.kv_b_proj.factor,
            self.sizes.nope_dim,
        )
        asked: mla_op.Query
        if isinstance(query, mla_op.Latents):
            enter = partial(mla_op.project_absorb_and_write, query_eps=self.q_a_layernorm.eps, eps=norm.eps)
            asked, latent = enter(cache.latent, query, expand, rows, nope_dim=nope_dim, pages=pages, impl=impl)
        elif early:
            enter = partial(mla_op.absorb_and_write, eps=norm.eps)
            asked, latent = enter(cache.latent, query, expand, rows, nope_dim=nope_dim, pages=pages, impl=impl)
        else:
            asked = query
            latent = write_rows(cache.latent, row, first, count, norm=norm, pages=pages, impl=impl)
        if keys is None:
            return asked, MlaCache(latent)
        keys, first, count = context.own(keys, starts, new, self.parallel)
        norm, impl = self.indexer.k_norm, self.impls.indexer
        index = write_keys(cache.index, keys, first, count, norm=norm, dtype=row.dtype, pages=pages, impl=impl)
        return asked, MlaCache(latent, index)

    def _select(
        self,
        query_latent: Float[Array, "rows tokens q_rank"],
        weights: Float[Array, "rows tokens index_heads"],
        positions: Int[Array, "rows tokens"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None,
    ) -> Int[Array, "rows tokens top_k"]:
        """Positions that each token attends to, of those up to its own."""
        q = self.indexer.ask(query_latent, self.q_a_layernorm)
        k, impl = self.indexer.sizes.top_k, self.impls.indexer
        return context.select(q, weights, cache.index, positions, self.parallel, k=k, pages=pages, impl=impl)

    def _select_here(
        self,
        query_latent: Float[Array, "rows tokens q_rank"],
        weights: Float[Array, "rows tokens index_heads"],
        positions: Int[Array, "rows tokens"],
        lengths: Int[Array, " rows"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None,
    ) -> Int[Array, "rows tokens top_k"]:
        """The same where the devices that share the sequence ask for other tokens: the keys come to the queries."""
        q, index = self.indexer.ask(query_latent, self.q_a_layernorm), cache.index
        index = context.gather_keys(index, lengths, self.parallel, pages)
        k, impl = self.indexer.sizes.top_k, self.impls.indexer
        return context.indexer.select(q, weights, index, positions, k=k, impl=impl)

    def _attend(
        self,
        query: mla_op.Query,
        gate: Float[Array, "rows tokens heads value_dim"],
        positions: Int[Array, "rows tokens"],
        lengths: Int[Array, " rows"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None,
        *,
        come: bool,
    ) -> Float[Array, "rows tokens heads value_dim"]:
        """Gated attention over everything up to each token's own position."""
        return context.attend(
            query,
            cache.latent,
            self.kv_b_proj.factor,
            positions,
            lengths,
            self.parallel,
            nope_dim=self.sizes.nope_dim,
            gate=gate,
            pages=pages,
            impl=self.impls.mla,
            come=come,
        )

    def _attend_selected(
        self,
        query: mla_op.Query,
        gate: Float[Array, "rows tokens heads value_dim"],
        selected: Int[Array, "rows tokens top_k"],
        lengths: Int[Array, " rows"],
        cache: MlaCache,
        pages: Int[Array, "rows table"] | None,
        *,
        come: bool,
    ) -> Float[Array, "rows tokens heads value_dim"]:
        """Gated attention over the selected positions."""
        return context.attend_selected(
            query,
            cache.latent,
            self.kv_b_proj.factor,
            selected,
            lengths,
            self.parallel,
            nope_dim=self.sizes.nope_dim,
            gate=gate,
            pages=pages,
            impl=self.impls.mla,
            come=come,
        )
