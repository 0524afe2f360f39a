"""The learned indexer: scores every cached token for a query and names the best ones (K3.1 Pro notes, section 4).

``score[t, s] = sum over heads of w[t, head] * relu(q[t, head] . key[s])``; candidates are the positions up to the query's own.
"""

import jax
from jaxtyping import Array, Float, Int

from kimi_jax.ops.chunks import by_chunks
from kimi_jax.ops.implementation import choose, ways
from kimi_jax.ops.indexer import kernels, reference
from kimi_jax.ops.indexer.keys import IndexCache

BYTES = 256 << 20
"""Scores that ``select`` holds at once, unless one token of every row needs more."""

SCORES = ways(reference.scores, kernels.scores)
TOP_K = ways(reference.top_k, kernels.top_k)
SELECT = ways(reference.select, kernels.select)


def scores(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
) -> Float[Array, "rows tokens length"]:
    """How much each cached token matters to each query: heads reduced inside, float32 accumulation.

    Args:
      q: index queries.
      w: signed weights of the heads, float32.
      index: keys already written for these tokens, [rows, length, ...], or pools of pages with a table ``pages``; keys past a
        query's position may be anything, also NaN.
      positions: of each query; -1 marks padding.
      pages: int32, for each sequence the pages that hold its keys, in order.
      impl: which implementation runs.

    Returns:
      ``length`` is the room of a sequence; -inf past a query's position, and everywhere for padding.
    """
    run = choose("indexer.scores", impl, SCORES)
    with jax.named_scope("indexer_scores"):
        return run(q, w, index, positions, pages)


def top_k(scores: Float[Array, "*queries length"], k: int, impl: str = "reference") -> Int[Array, "*queries k"]:
    """Positions of the ``k`` largest scores, int32, ascending, filled up with -1 at the end.

    A score of -inf is never chosen. Equal scores: the smaller position; -0.0 equals +0.0.
    """
    run = choose("indexer.top_k", impl, TOP_K)
    with jax.named_scope("indexer_top_k"):
        return run(scores, k=k)


def select(
    q: Float[Array, "rows tokens heads width"],
    w: Float[Array, "rows tokens heads"],
    index: IndexCache,
    positions: Int[Array, "rows tokens"],
    *,
    k: int,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    budget: int = BYTES,
) -> Int[Array, "rows tokens k"]:
    """The ``k`` tokens that matter most to each query, as :func:`top_k` orders them; fewer where fewer are visible.

    Args:
      q, w, index, positions, pages, impl: as for :func:`scores`.
      k: tokens that a query may attend to.
      budget: bytes of scores that may exist at once; queries run in chunks that fit, of at least one token a row.
    """
    run = choose("indexer.select", impl, SELECT)
    rows = positions.shape[0]
    room = index.keys.shape[1] * (1 if pages is None else pages.shape[1])

    def some(given: tuple[Array, Array, Array]) -> Array:
        q, w, positions = given
        with jax.named_scope("indexer_select"):
            return run(q, w, index, positions, pages, k=k)

    return by_chunks(some, (q, w, positions), (0, 0, -1), max(1, budget // (4 * rows * room)))
