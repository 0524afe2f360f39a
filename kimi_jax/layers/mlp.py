"""The gated MLP of the dense first layer and of the shared experts."""

from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.layers.linear import Linear
from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.linear.weights import Gated
from kimi_jax.precision import Precision


class GatedMlp(nnx.Module):
    """``W_down situ(W_gate x, W_up x)``; the result is this rank's partial sum over the ``ffn`` axis."""

    def __init__(self, hidden: int, width: int, beta: float, linear_beta: float | None, precision: Precision) -> None:
        self.gate_proj = Linear(width, hidden, ("ffn", "embed"), precision)
        self.up_proj = Linear(width, hidden, ("ffn", "embed"), precision)
        self.down_proj = Linear(hidden, width, ("embed", "ffn"), precision)
        self.beta, self.linear_beta = beta, linear_beta

    @property
    def first(self) -> Gated:
        """The first half, for a launch that also projects the input for others."""
        return Gated(self.gate_proj.factor, self.up_proj.factor, self.beta, self.linear_beta)

    def __call__(self, x: Float[Array, "*rows embed"], impl: Impl = "reference") -> Float[Array, "*rows embed"]:
        (inner,) = linear_op.project_many(x, [self.first], impl=impl)
        return self.down_proj(inner, impl=impl)
