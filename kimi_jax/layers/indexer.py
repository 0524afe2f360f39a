"""The learned indexer of K3.1 Pro: what it keeps of a token, and what a token asks with (K3.1 Pro notes, sections 3 and 4)."""

from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import KimiConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import param
from kimi_jax.ops import norm as norm_op
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import FLOAT32, Precision


class KeyNorm(nnx.Module):
    """LayerNorm over one index key, with the text model's epsilon."""

    def __init__(self, width: int, eps: float, precision: Precision) -> None:
        self.weight = param((width,), precision.operand, (None,))
        self.bias = param((width,), precision.operand, (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return norm_op.layer_norm(x, self.weight[...], self.bias[...], self.eps)


class Indexer(nnx.Module):
    """One key per token, and queries and weights of a few heads; no rotation on either side."""

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        assert config.indexer is not None
        index, hidden, rank = config.indexer, config.hidden, config.mla.q_rank
        self.wq_b = Linear(index.heads * index.head_dim, rank, ("index_heads", None), precision, (index.heads, rank))
        self.wk = Linear(index.head_dim, hidden, (None, "embed"), precision)
        self.weights_proj = Linear(index.heads, hidden, ("index_heads", "embed"), precision)
        self.k_norm = KeyNorm(index.head_dim, config.rms_eps, precision)
        self.sizes = index
        self.parallel, self.impls = parallel, impls

    def read(
        self, x: Float[Array, "rows tokens embed"]
    ) -> tuple[Float[Array, "rows tokens width"], Float[Array, "rows tokens heads"]]:
        """The key of each token before its norm, and its signed head weights; float32.

        Args:
          x: what the attention projections read.
        """
        factors = [self.wk.factor, self.weights_proj.factor]
        key, weights = linear_op.project_many(x, factors, [FLOAT32, FLOAT32], self.impls.linear)
        weights = self.parallel.all_gather(weights, "index_heads", -1)
        scale = self.sizes.heads**-0.5 * self.sizes.head_dim**-0.5
        return key, weights * scale

    def ask(
        self, query_latent: Float[Array, "rows tokens q_rank"], norm: RmsNorm
    ) -> Float[Array, "rows tokens heads width"]:
        """The index queries, in the dtype of the latent.

        Args:
          query_latent: the query latent of attention before its norm.
          norm: that norm.
        """
        expand = self.wq_b.factor
        q = linear_op.project_normed(query_latent, norm.weight[...], norm.eps, expand, self.impls.linear)
        q = q.reshape(*query_latent.shape[:2], -1, self.sizes.head_dim)
        return self.parallel.all_gather(q, "index_heads", 2)
