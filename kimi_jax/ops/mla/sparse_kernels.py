"""Latent attention over chosen rows out of kernels: the queries absorbed, every share attended to, the shares joined.

Three launches, as for all rows (``kernels``); the first and the last are the same ones.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from kimi_jax.ops.chunks import by_chunks
from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla import sparse_split
from kimi_jax.ops.mla.absorb import Absorbed, Query, moved, scale_of
from kimi_jax.ops.mla.launch import check_cache
from kimi_jax.ops.mla.merge import merge, merge_expanded
from kimi_jax.ops.once import once

FLOAT32 = 4
"""Bytes of a value of a share."""


@once
def attend(
    query: Query,
    latent: Float[Array, "pool page row_dim"],
    kv_b: Matrix,
    selected: Int[Array, "rows tokens k"],
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    nope_dim: int,
    budget: int,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads value_dim"]:
    """See ``sparse.attend_selected``; what must fit in ``budget`` are the results of shares before they are joined."""
    check_cache(latent, None)
    width, scale, is_moved = kv_b.shape[1], scale_of(query, kv_b, nope_dim), isinstance(query, Absorbed)

    def some(given: Any) -> Any:
        query, selected, gate = given
        tokens = query.shape[1]
        query = query if is_moved else moved(query, kv_b, nope_dim=nope_dim, interpret=interpret)
        shares = sparse_split.attend(query, latent, selected, pages, latent=width, scale=scale, interpret=interpret)
        return merge_expanded(
            shares, None, kv_b, gate, tokens=tokens, capacity=0, nope_dim=nope_dim, interpret=interpret
        )

    empty = (0, -1, None if gate is None else 0)
    given = query.rows if isinstance(query, Absorbed) else query
    return by_chunks(some, (given, selected, gate), empty, _most(given, width, budget))


@once
def attend_partial(
    query: Float[Array, "rows tokens heads row_dim"],
    latent: Float[Array, "pool page row_dim"],
    selected: Int[Array, "rows tokens k"],
    pages: Int[Array, "rows pages"] | None = None,
    *,
    latent_dim: int,
    scale: float,
    budget: int,
    interpret: bool = False,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """See ``sparse.attend_selected_partial``."""
    check_cache(latent, None)

    def some(given: Any) -> Any:
        query, selected = given
        shares = sparse_split.attend(
            query, latent, selected, pages, latent=latent_dim, scale=scale, interpret=interpret
        )
        return merge(shares, None, tokens=query.shape[1], capacity=0, interpret=interpret, nothing=-float("inf"))

    return by_chunks(some, (query, selected), (0, -1), _most(query, latent_dim, budget))


def _most(query: Float[Array, "rows tokens heads dim"], latent: int, budget: int) -> int:
    """Tokens of a row whose results, one share each, fit in ``budget`` bytes."""
    return max(1, budget // (query.shape[0] * query.shape[2] * latent * FLOAT32))
