"""Queries moved into the coordinates of a cached row: the key part of kv_b acts on the query instead of on every row.

In a decode step the rows of the same tokens go into the cache beside it, in the same launch: neither needs the other, and what
attends to them is a later launch.
"""

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla.expand import by_head, load_expand
from kimi_jax.ops.mla.launch import capacity, check_cache, dot, launch, limit, load, padded, span
from kimi_jax.ops.mla.write import NewRows, store_row
from kimi_jax.ops.once import once

TOKENS, COLUMNS = 64, 32
"""Tile of one program: 12 heads x 16 tiles of columns are 192 programs, and each weight is read once per 64 tokens."""


class Absorbed(NamedTuple):
    """Queries that :func:`absorb_and_write` has moved already, wherever attention takes a query: [rows, tokens, heads, row_dim]."""

    rows: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the queries; the last entry is the width of a cached row."""
        return self.rows.shape


Query = Float[Array, "rows tokens heads query_dim"] | Absorbed


def moved(query: Query, expand: Matrix, *, nope_dim: int, interpret: bool) -> Float[Array, "rows tokens heads row_dim"]:
    """The queries, moved here unless they were before."""
    return query.rows if isinstance(query, Absorbed) else absorb(query, expand, nope_dim=nope_dim, interpret=interpret)


def scale_of(query: Query, expand: Matrix, nope_dim: int) -> float:
    """Of the scores: the inverse root of a query's width before it was moved."""
    width = query.shape[-1] - expand.shape[1] + nope_dim if isinstance(query, Absorbed) else query.shape[-1]
    return width**-0.5


def absorb(
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    *,
    nope_dim: int,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads row_dim"]:
    """See ``api.absorb``."""
    work = _Work.of(query, expand, nope_dim)

    def kernel(query_ref: Any, expand_ref: Any, out_ref: Any) -> None:
        work.move(query_ref, expand_ref, out_ref, *(pl.program_id(axis) for axis in range(3)))

    out = launch(
        kernel,
        "mla_absorb",
        (work.heads, *work.grid),
        work.result,
        query.reshape(-1, *query.shape[2:]),
        by_head(expand, work.heads),
        interpret=interpret,
    )
    return out.reshape(*query.shape[:3], -1)


@once
def absorb_and_write(
    cache: Float[Array, "pool page row_dim"],
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    new: NewRows,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    nope_dim: int,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "rows tokens heads row_dim"], Float[Array, "pool page row_dim"]]:
    """See ``api.absorb_and_write``."""
    work = _Work.of(query, expand, nope_dim)
    given = query.reshape(-1, *query.shape[2:])
    out, held = beside_a_write("mla_absorb_write", work, cache, given, expand, new, pages, eps, interpret)
    return out.reshape(*query.shape[:3], -1), held


def beside_a_write(
    name: str,
    work: Any,
    cache: Float[Array, "pool page row_dim"],
    query: Any,
    expand: Matrix,
    new: NewRows,
    pages: Int[Array, "rows pages"] | None,
    eps: float,
    interpret: bool,
) -> tuple[Float[Array, "queries heads row_dim"], Float[Array, "pool page row_dim"]]:
    """``work`` on the queries, and past its last head a program for each new row."""
    check_cache(cache, pages)
    rows, tokens, _ = new.values.shape
    beside, room = work.grid[0] * work.grid[1], capacity(cache, pages)

    def kernel(
        cache_ref: Any, query_ref: Any, expand_ref: Any, new_refs: NewRows, pages_ref: Any, out_ref: Any, held_ref: Any
    ) -> None:
        del cache_ref  # the second result lies in its place
        head, part, block = (pl.program_id(axis) for axis in range(3))
        number = (head - work.heads) * beside + part * work.grid[1] + block

        @pl.when(head < work.heads)
        def _() -> None:
            work.move(query_ref, expand_ref, out_ref, head, part, block)

        @pl.when((head >= work.heads) & (number < rows * tokens))
        def _() -> None:
            row, token = jax.lax.div(number, tokens), jax.lax.rem(number, tokens)
            store_row(held_ref, new_refs, pages_ref, row, token, room, eps)

    out, held = launch(
        kernel,
        name,
        (work.heads + pl.cdiv(rows * tokens, beside), *work.grid),
        (work.result, jax.ShapeDtypeStruct(cache.shape, cache.dtype)),
        cache,
        query,
        by_head(expand, work.heads),
        new,
        pages,
        interpret=interpret,
        aliases={0: 1},
    )
    return out, held


class _Work(NamedTuple):
    """What the programs of one head do between them: ``grid`` tiles of columns and blocks of tokens."""

    queries: int
    heads: int
    latent: int
    nope_dim: int
    shared_dim: int
    dtype: Any

    @classmethod
    def of(cls, query: Float[Array, "rows tokens heads query_dim"], expand: Matrix, nope_dim: int) -> "_Work":
        rows, tokens, heads, query_dim = query.shape
        return cls(rows * tokens, heads, expand.shape[1], nope_dim, query_dim - nope_dim, expand.dtype)

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and columns of a program."""
        return min(TOKENS, padded(self.queries)), min(COLUMNS, padded(self.latent))

    @property
    def grid(self) -> tuple[int, int]:
        size, columns = self.tile
        return pl.cdiv(self.latent, columns), pl.cdiv(self.queries, size)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.queries, self.heads, self.latent + self.shared_dim), self.dtype)

    def move(self, query_ref: Any, expand_ref: Any, out_ref: Any, head: Any, part: Any, block: Any) -> None:
        """One program: some columns of some tokens' queries of one head; the first also copies their shared parts."""
        size, columns = self.tile
        latent, nope_dim = self.latent, self.nope_dim
        token = span(block * size, size)[:, None]
        own = span(0, padded(nope_dim))
        column = span(part * columns, columns)
        q_td = load(query_ref, token, head, own[None], limits=(self.queries, None, limit(nope_dim)))
        w_dr = load_expand(
            expand_ref, head, own[:, None], column[None], limits=(None, limit(nope_dim), limit(latent, columns))
        )
        out_tr = dot(q_td.astype(self.dtype), w_dr, (1, 0)).astype(self.dtype)
        written = (token < self.queries) & (column[None] < latent)
        plt.store(out_ref.at[token, head, column[None]], out_tr, mask=written)

        @pl.when(part == 0)
        def _() -> None:
            shared = span(0, padded(self.shared_dim))[None]
            limits = (self.queries, None, nope_dim + self.shared_dim)
            q_ts = load(query_ref, token, head, nope_dim + shared, limits=limits)
            there = (token < self.queries) & (shared < self.shared_dim)
            plt.store(out_ref.at[token, head, latent + shared], q_ts.astype(self.dtype), mask=there)
