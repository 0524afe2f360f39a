"""The indexer out of kernels: one launch scores every visible key, one for each round of the tournament chooses."""

from jaxtyping import Array, Float, Int

from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.indexer.pallas_scores import scores as scores
from kimi_jax.ops.indexer.pallas_top_k import top_k as top_k
from kimi_jax.ops.once import once


@once
def select(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    pages: Int[Array, "rows pages"] | None = None,
    *,
    k: int,
    interpret: bool = False,
) -> Int[Array, "rows tokens k"]:
    """See ``api.select``; all queries at once. Work follows the furthest position, not the room of a sequence."""
    visible = scores(q, w, index, positions, pages, fill=False, interpret=interpret)
    return top_k(visible, positions, k=k, interpret=interpret)
