"""Attention Residuals: mix the finished blocks and the running sum of a token.

Source: Attention Residuals (arXiv 2603.15031); text-model section 2.3. The published two-phase form (all sites of a block scored
against its finished sources at once) is not built: see docs of :func:`mix_norm`.
"""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.ops import norm
from kimi_jax.ops.attn_res import pallas, reference
from kimi_jax.ops.implementation import choose

mix = reference.mix


def mix_norm(
    blocks: Sequence[Float[Array, "*tokens embed"]],
    prefix: Float[Array, "*tokens embed"],
    update: Float[Array, "*tokens embed"] | None,
    weight: Float[Array, " embed"],
    row: Float[Array, " embed"],
    eps: float,
    scale: Float[Array, " embed"],
    norm_eps: float,
    impl: str = "reference",
) -> tuple[Float[Array, "*tokens embed"], Float[Array, "*tokens embed"]]:
    """One site: the running sum takes the last update in, the sources are mixed, the result is normalised.

    The kernel reads every source once. Scoring a block's finished sources for its 24 sites ahead (the published two-phase form)
    would still leave a float32 partial sum per site and token to write and to read: 28 KB each way at width 7168, against 14 KB
    for each of at most 8 sources, so it moves as many bytes on average, needs 1.4 GB for a chunk of 2,048 tokens, and saves no
    launch.

    Args:
      blocks, eps: as for :func:`mix`.
      prefix: running sum of the current block without ``update``.
      update: result of the last sub-layer, rounded into the sum before it is read as a source; None where the sum is whole.
      weight, row: of the site's own norm and projection; their product is the query of :func:`mix`.
      scale: weight of the norm that follows.
      norm_eps: of that norm.
      impl: which implementation runs.

    Returns:
      The normalised mix, and the running sum with ``update``; both in ``prefix.dtype``.
    """
    built = {
        "reference": _written_out,
        "pallas": partial(pallas.mix_norm, interpret=False),
        "interpret": partial(pallas.mix_norm, interpret=True),
    }
    return choose("attn_res.mix_norm", impl, built)(
        blocks, prefix, update, weight, row, scale, eps=eps, norm_eps=norm_eps
    )


def _written_out(
    blocks: Sequence[Float[Array, "*tokens embed"]],
    prefix: Float[Array, "*tokens embed"],
    update: Float[Array, "*tokens embed"] | None,
    weight: Float[Array, " embed"],
    row: Float[Array, " embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
    norm_eps: float,
) -> tuple[Float[Array, "*tokens embed"], Float[Array, "*tokens embed"]]:
    prefix = prefix if update is None else prefix + update
    query = weight.astype(jnp.float32) * row.astype(jnp.float32)
    return norm.rms_norm(mix(blocks, prefix, query, eps), scale, norm_eps), prefix
