"""What a KDA sub-layer computes with between its projections and its output projection."""

from typing import NamedTuple

from jaxtyping import Array, Float

from kimi_jax.ops.linear.weights import Matrix


class Projected(NamedTuple):
    """Projections of the new tokens, in the activation dtype; positions past a row's length may hold anything, also NaN.

    Attributes:
      q, k, v: before their short convolutions.
      gate: logits of the output gate.
      latent: of the decay: small, whole on every device, widened per head by ``Weights.decay``.
      b: logits of beta.
    """

    q: Float[Array, "rows tokens channels"]
    k: Float[Array, "rows tokens channels"]
    v: Float[Array, "rows tokens channels"]
    gate: Float[Array, "rows tokens channels"]
    latent: Float[Array, "rows tokens rank"]
    b: Float[Array, "rows tokens heads"]


class Weights(NamedTuple):
    """Parameters; channel ``head * dim + i`` is channel ``i`` of that head. All float32 but ``decay``.

    Attributes:
      q_conv, k_conv, v_conv: filters; the last tap multiplies the current token.
      decay: widens the latent to gate logits, [channels, rank]; in the dtype of dot operands, or FP8.
      A_log: one entry per head.
      dt_bias: added to the gate logits.
      norm: of the output, shared by all heads.
    """

    q_conv: Float[Array, "channels one taps"]
    k_conv: Float[Array, "channels one taps"]
    v_conv: Float[Array, "channels one taps"]
    decay: Matrix
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, "heads dim"]
    norm: Float[Array, " dim"]
