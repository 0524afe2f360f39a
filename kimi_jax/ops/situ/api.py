"""SiTU, the gated activation of every feed-forward part: both halves are squashed (text-model section 2.2)."""

from jaxtyping import Array, Float

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.situ import reference


def situ(
    gate: Float[Array, "*tokens width"],
    up: Float[Array, "*tokens width"],
    beta: float,
    linear_beta: float | None,
    impl: str = "reference",
) -> Float[Array, "*tokens width"]:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``.

    Args:
      gate: any finite values; the sigmoid reads them unsquashed.
      up: values of the linear half.
      beta: bound of the gated half, ``activation_situ_beta``.
      linear_beta: bound of the linear half, ``activation_situ_linear_beta``; None leaves that half as it is.
      impl: which implementation runs.

    Returns:
      In ``gate.dtype``; all arithmetic is float32.
    """
    return choose("situ", impl, {"reference": reference.situ})(gate, up, beta, linear_beta)
