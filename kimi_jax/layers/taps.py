"""Vectors of chosen layers of the target, as a draft model reads them (DSpark notes, section 5).

There is no single residual stream between two layers. ``prefix`` is the running sum of the current block after the layer's
feed-forward. ``attn_res`` is the mixture that the next layer's attention would form of the finished blocks and that sum, before its
own norm; after the last layer it is the model's output mixture. Reading changes neither blocks nor sum.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.layers.norm import RmsNorm
from kimi_jax.ops.attn_res import api as attn_res


@dataclass(frozen=True)
class Taps:
    """Which layers are read, counted from 0 and ascending, and which of the two vectors."""

    layers: tuple[int, ...]
    stream: Literal["attn_res", "prefix"]


def tap(
    blocks: tuple[Float[Array, "rows tokens embed"], ...],
    prefix: Float[Array, "rows tokens embed"],
    update: Float[Array, "rows tokens embed"] | None,
    mixing: RmsNorm,
    row: Float[Array, "one embed"],
    stream: str,
) -> Float[Array, "rows tokens embed"]:
    """The vector after one layer.

    Args:
      blocks, prefix, update: the residuals as the layer leaves them.
      mixing, row: norm and projection of the site that reads them next.
      stream: which vector.
    """
    total = prefix if update is None else prefix + update
    if stream == "prefix":
        return total
    query = mixing.weight[...].astype(jnp.float32) * row.reshape(-1).astype(jnp.float32)
    return attn_res.mix(blocks, total, query, mixing.eps)
