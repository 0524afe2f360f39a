"""The short convolution as shifted multiply-adds: a convolution instruction would be a library call on the target."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "rows tokens channels"],
    window: Float[Array, "rows taps_less_one channels"],
    weight: Float[Array, "channels one taps"],
    lengths: Int[Array, " rows"],
) -> tuple[Float[Array, "rows tokens channels"], Float[Array, "rows taps_less_one channels"]]:
    """See ``api.short_conv``."""
    tokens, taps = x.shape[1], weight.shape[-1]
    inputs = jnp.concatenate([window, x], axis=1)  # the wider dtype of the two
    mixed = sum(inputs[:, tap : tap + tokens].astype(jnp.float32) * weight[:, 0, tap] for tap in range(taps))
    real = jnp.arange(tokens) < lengths[:, None]
    out = jnp.where(real[..., None], jax.nn.silu(mixed), 0).astype(x.dtype)
    # Token i is inputs[taps - 1 + i]: after `length` tokens the last taps - 1 inputs begin at inputs[length].
    kept = _rows_from(inputs, jnp.clip(lengths, 0, tokens), taps - 1)
    return out, kept.astype(window.dtype)


def _rows_from(
    inputs: Float[Array, "rows tokens channels"], start: Int[Array, " rows"], count: int
) -> Float[Array, "rows count channels"]:
    """``count`` tokens of each row from its own start: copied, never multiplied, so padding cannot leak."""
    cut = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, count))
    return cut(inputs, start)
