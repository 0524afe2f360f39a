"""Queries moved into the coordinates of a cached row: the key part of kv_b acts on the query instead of on every row."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla.expand import by_head, load_expand
from kimi_jax.ops.mla.launch import dot, launch, limit, load, padded, span

TOKENS, COLUMNS = 64, 32
"""Tile of one program: 12 heads x 16 tiles of columns are 192 programs, and each weight is read once per 64 tokens."""


def absorb(
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    *,
    nope_dim: int,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads row_dim"]:
    """See ``api.absorb``."""
    rows, tokens, heads, query_dim = query.shape
    latent, shared_dim, count = expand.shape[1], query_dim - nope_dim, rows * tokens
    size, columns = min(TOKENS, padded(count)), min(COLUMNS, padded(latent))

    def kernel(query_ref: Any, expand_ref: Any, out_ref: Any) -> None:
        head, part, block = (pl.program_id(axis) for axis in range(3))
        token = span(block * size, size)[:, None]
        own = span(0, padded(nope_dim))
        column = span(part * columns, columns)
        q_td = load(query_ref, token, head, own[None], limits=(count, None, limit(nope_dim)))
        w_dr = load_expand(
            expand_ref, head, own[:, None], column[None], limits=(None, limit(nope_dim), limit(latent, columns))
        )
        out_tr = dot(q_td.astype(expand.dtype), w_dr, (1, 0)).astype(expand.dtype)
        written = (token < count) & (column[None] < latent)
        plt.store(out_ref.at[token, head, column[None]], out_tr, mask=written)

        @pl.when(part == 0)
        def _() -> None:
            shared = span(0, padded(shared_dim))[None]
            q_ts = load(query_ref, token, head, nope_dim + shared, limits=(count, None, query_dim))
            there = (token < count) & (shared < shared_dim)
            plt.store(out_ref.at[token, head, latent + shared], q_ts.astype(expand.dtype), mask=there)

    out = launch(
        kernel,
        "mla_absorb",
        (heads, pl.cdiv(latent, columns), pl.cdiv(count, size)),
        jax.ShapeDtypeStruct((count, heads, latent + shared_dim), expand.dtype),
        query.reshape(count, heads, query_dim),
        by_head(expand, heads),
        interpret=interpret,
    )
    return out.reshape(rows, tokens, heads, -1)
