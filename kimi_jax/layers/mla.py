"""Gated latent attention without positions (text-model section 3.2)."""

from dataclasses import replace

from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.cache import MlaCache, write_rows
from kimi_jax.config import LATENT_EPS, KimiConfig
from kimi_jax.layers.indexer import Indexer
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
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
            self.indexer = Indexer(config, precision)
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
    ) -> tuple[Float[Array, "rows tokens embed"], MlaCache]:
        """Writes the rows of these tokens, then attends.

        Args:
          positions: position of each token, negative for padding.
          new: real tokens of each row.
          lengths: written rows per sequence once these tokens are in.
          pages: where the rows of each sequence lie when the cache is a pool.
        """
        sizes, impl = self.sizes, self.impls.linear
        readers = (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)
        query_latent, row, gate = linear_op.project_many(x, [reader.weight[...] for reader in readers], impl=impl)
        query_latent = self.parallel.all_gather(query_latent, "q_lora", -1)
        norm, expand = self.q_a_layernorm, self.q_b_proj
        query = linear_op.project_normed(query_latent, norm.weight[...], norm.eps, expand.weight[...], impl)
        query = query.reshape(*x.shape[:2], -1, sizes.query_dim)
        latent = write_rows(
            cache.latent, row, lengths - new, new, norm=self.kv_a_layernorm, pages=pages, impl=self.impls.mla
        )
        if hasattr(self, "indexer"):
            self.indexer(x, norm(query_latent))
        out = mla_op.attend(
            query,
            latent,
            self.kv_b_proj.weight[...],
            positions,
            lengths,
            nope_dim=sizes.nope_dim,
            gate=gate.reshape(*query.shape[:3], sizes.value_dim),
            pages=pages,
            impl=self.impls.mla,
        )
        out = self.o_proj(out.reshape(*x.shape[:2], -1), impl=impl)
        return self.parallel.psum(out, "heads"), MlaCache(latent)
