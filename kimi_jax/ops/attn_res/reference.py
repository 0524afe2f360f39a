"""The mix written for XLA: no stacking of the sources, so nothing is copied."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def score(source: Float[Array, "*tokens embed"], query: Float[Array, " embed"], eps: float) -> Float[Array, "*tokens"]:
    """Projection of the normalised source on the site's query; no 1/sqrt(embed)."""
    wide = source.astype(jnp.float32)
    return jnp.sum(wide * query, axis=-1) * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)


def mix(
    blocks: Sequence[Float[Array, "*tokens embed"]],
    prefix: Float[Array, "*tokens embed"],
    query: Float[Array, " embed"],
    eps: float,
) -> Float[Array, "*tokens embed"]:
    """Softmax-weighted sum of the raw sources, scored by their normalised projection.

    Args:
      blocks: finished block sums, oldest first; may be empty.
      prefix: running sum of the current block, always the last source.
      query: norm weight times projection row, float32; the two only ever act as a product.
      eps: added to the mean square of a source.

    Returns:
      The mixed vector in ``prefix.dtype``; all arithmetic is float32.
    """
    sources = (*blocks, prefix)
    weights = jax.nn.softmax(jnp.stack([score(source, query, eps) for source in sources]), axis=0)
    mixed = sum(weight[..., None] * source.astype(jnp.float32) for weight, source in zip(weights, sources, strict=True))
    return jnp.asarray(mixed).astype(prefix.dtype)
