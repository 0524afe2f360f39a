"""The learned indexer of K3.1 Pro: its parameters are declared here; its forward is not built yet."""

from typing import Any, NoReturn

from flax import nnx

from kimi_jax.config import KimiConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.param import param
from kimi_jax.precision import Precision


class KeyNorm(nnx.Module):
    """LayerNorm weight and bias over one index key."""

    def __init__(self, width: int, precision: Precision) -> None:
        self.weight = param((width,), precision.operand, (None,))
        self.bias = param((width,), precision.operand, (None,))


class Indexer(nnx.Module):
    """Scores every earlier token for a query and keeps the best ones (K3.1 Pro notes, section 3)."""

    def __init__(self, config: KimiConfig, precision: Precision) -> None:
        assert config.indexer is not None
        index, hidden, rank = config.indexer, config.hidden, config.mla.q_rank
        self.wq_b = Linear(index.heads * index.head_dim, rank, ("index_heads", None), precision, (index.heads, rank))
        self.wk = Linear(index.head_dim, hidden, (None, "embed"), precision)
        self.weights_proj = Linear(index.heads, hidden, ("index_heads", "embed"), precision)
        self.k_norm = KeyNorm(index.head_dim, precision)

    def __call__(self, x: Any, query_latent: Any) -> NoReturn:
        raise NotImplementedError(
            "K3.1 Pro's sparse indexer is declared (plan, bytes, names) but its forward is not built yet; Kimi-K3 checkpoints run"
        )
