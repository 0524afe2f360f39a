"""Root-mean-square normalisation."""

from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.layers.param import param
from kimi_jax.ops import norm
from kimi_jax.precision import Precision


class RmsNorm(nnx.Module):
    """A norm over a width that no layout cuts."""

    def __init__(self, width: int, eps: float, precision: Precision) -> None:
        self.weight = param((width,), precision.operand, (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return norm.rms_norm(x, self.weight[...], self.eps)
