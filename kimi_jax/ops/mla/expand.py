"""kv_b as attention reads it: head by head, as dot operands rather than as a projection of a row.

An FP8 weight keeps its per-channel scales here: its values are rounded to the dtype of the other operands tile by tile, in
registers, so that what is read from memory is the codes. Key rows are summed over and value rows are results, so no one factor
could stand outside the products.
"""

from typing import Any

import jax.numpy as jnp

from kimi_jax.ops.linear.weights import Matrix, Scaled
from kimi_jax.ops.mla.launch import load


def by_head(expand: Matrix, heads: int) -> Any:
    """``[heads, key and value rows, latent]``; scales ``[heads, key and value rows]``."""
    latent = expand.shape[1]
    if isinstance(expand, Scaled):
        return Scaled(expand.codes.reshape(heads, -1, latent), expand.scale.reshape(heads, -1), expand.dtype)
    return expand.reshape(heads, -1, latent)


def load_expand(expand: Any, *index: Any, limits: tuple[int | None, ...]) -> Any:
    """``launch.load`` of a weight inside a kernel; the last index runs over the latent, which a scale does not depend on."""
    if not isinstance(expand, Scaled):
        return load(expand, *index, limits=limits)
    codes = load(expand.codes, *index, limits=limits).astype(jnp.float32)
    return (codes * load(expand.scale, *index[:-1], limits=limits[:-1])).astype(expand.dtype)
