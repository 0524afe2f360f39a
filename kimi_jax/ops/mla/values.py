"""The value half of kv_b and the output gate, where attention was joined before them: over devices that share a sequence."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.linear.weights import Matrix, widened
from kimi_jax.ops.mla.merge import merge_expanded
from kimi_jax.ops.mla.reference import einsum, gated
from kimi_jax.ops.mla.split import Shares
from kimi_jax.ops.once import once


def values(
    latent: Float[Array, "rows tokens heads latent"],
    expand: Matrix,
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    impl: str = "reference",
) -> Float[Array, "rows tokens heads value_dim"]:
    """Per-head values of attention over latents.

    Args:
      latent: sum of latents by softmax weight, float32.
      expand: kv_b weight, as in ``api.attend``.
      nope_dim: width of a head's own key, whose rows of ``expand`` come before its value rows.
      gate: logits of the output gate; the result is then multiplied by their sigmoid and has their dtype.
    """
    built = {"reference": _reference, "pallas": _kernel, "interpret": partial(_kernel, interpret=True)}
    with jax.named_scope("mla_values"):
        return choose("mla.values", impl, built)(latent, expand, gate, nope_dim=nope_dim)


def _reference(
    latent: Float[Array, "rows tokens heads latent"],
    expand: Matrix,
    gate: Float[Array, "rows tokens heads value_dim"] | None,
    *,
    nope_dim: int,
) -> Float[Array, "rows tokens heads value_dim"]:
    weight = widened(expand)
    per_head = weight.reshape(latent.shape[2], -1, weight.shape[1])
    # the whole weight instead of a slice of it, which would be copied at every step
    out = einsum("btnr,ndr->btnd", latent.astype(weight.dtype), per_head)[..., nope_dim:]
    return out if gate is None else gated(out, gate)


@once
def _kernel(
    latent: Float[Array, "rows tokens heads latent"],
    expand: Matrix,
    gate: Float[Array, "rows tokens heads value_dim"] | None,
    *,
    nope_dim: int,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads value_dim"]:
    rows, tokens, heads, width = latent.shape
    # what was joined is one share of one row
    share = Shares(latent.reshape(rows, 1, tokens * heads, width), jnp.zeros((rows, 1, tokens * heads), jnp.float32))
    one = jnp.ones(rows, jnp.int32)
    return merge_expanded(share, one, expand, gate, tokens=tokens, capacity=1, nope_dim=nope_dim, interpret=interpret)
