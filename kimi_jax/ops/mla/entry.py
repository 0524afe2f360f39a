"""A decode step's way into latent attention in one launch: queries projected and absorbed, new rows written.

A program takes some columns of one head and projects the head's queries anew for them: q_b is read from memory once and by the
other programs of its head from a cache, 0.4 MB each in Kimi-K3, in about the time that a launch between the two would take.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.pallas import product
from kimi_jax.ops.linear.tile import Load, Tile, normed
from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla.absorb import beside_a_write
from kimi_jax.ops.mla.expand import load_expand
from kimi_jax.ops.mla.launch import dot, limit, padded, span
from kimi_jax.ops.mla.write import NewRows
from kimi_jax.ops.once import once

MOST_QUERIES = 16
"""Tokens of all rows that one program takes; more of them are worth launches of their own."""

COLUMNS, INNER, WARPS = 128, 256, 4
"""Latent columns of a program, inner width of a pass of the projection, and wavefronts."""


class Latents(NamedTuple):
    """Queries before their projection.

    Attributes:
      rows: what the queries of all heads are projected from, before its norm.
      norm: weight of that norm.
      weight: q_b, head-major; each head has ``nope_dim`` rows and those of the shared key.
    """

    rows: Float[Array, "rows tokens q_rank"]
    norm: Float[Array, " q_rank"]
    weight: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return self.rows.shape


@once
def project_absorb_and_write(
    cache: Float[Array, "pool page row_dim"],
    query: Latents,
    expand: Matrix,
    new: NewRows,
    pages: Int[Array, "rows pages"] | None = None,
    *,
    nope_dim: int,
    query_eps: float,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "rows tokens heads row_dim"], Float[Array, "pool page row_dim"]]:
    """See ``api.project_absorb_and_write``."""
    rows, tokens, width = query.rows.shape
    latent, shared_dim = expand.shape[1], cache.shape[2] - expand.shape[1]
    heads = query.weight.shape[0] // (nope_dim + shared_dim)
    work = _Work(rows * tokens, heads, width, latent, nope_dim, shared_dim, expand.dtype, query_eps)
    given = Latents(query.rows.reshape(-1, width), query.norm[None], query.weight)
    out, held = beside_a_write("mla_enter", work, cache, given, expand, new, pages, eps, interpret)
    return out.reshape(rows, tokens, heads, -1), held


class _Work(NamedTuple):
    """What the programs of one head do between them: ``grid`` tiles of columns, and one for the shared part."""

    queries: int
    heads: int
    width: int
    latent: int
    nope_dim: int
    shared_dim: int
    dtype: Any
    eps: float

    @property
    def columns(self) -> int:
        return min(COLUMNS, padded(self.latent))

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.latent, self.columns) + 1, 1

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.queries, self.heads, self.latent + self.shared_dim), self.dtype)

    def move(self, query: Any, expand_ref: Any, out_ref: Any, head: Any, part: Any, block: Any) -> None:
        """One program; ``query`` holds references."""
        del block  # one block of tokens is all
        token = span(0, padded(self.queries))[:, None]

        def project(start: int, size: int) -> Any:
            """Queries of some dims of this head, [token, dim], rounded; zeros past them."""
            d = span(0, padded(size))
            tile = Tile(False, token.shape[0], d.shape[0], self.width, min(INNER, padded(self.width)), WARPS)
            rows: Load = normed(query.rows, query.norm, tile=tile, eps=self.eps)
            channel_d = head * (self.nope_dim + self.shared_dim) + start + jnp.minimum(d, size - 1)
            q_td = product(rows, None, query.weight, channel_d, tile).astype(query.rows.dtype)
            return jnp.where((d < size)[None], q_td, 0).astype(self.dtype)

        @pl.when(part < self.grid[0] - 1)
        def _() -> None:
            own, column = span(0, padded(self.nope_dim)), span(part * self.columns, self.columns)
            w_dr = load_expand(
                expand_ref,
                head,
                own[:, None],
                column[None],
                limits=(None, limit(self.nope_dim), limit(self.latent, self.columns)),
            )
            out_tr = dot(project(0, self.nope_dim), w_dr, (1, 0)).astype(self.dtype)
            there = (token < self.queries) & (column[None] < self.latent)
            plt.store(out_ref.at[token, head, column[None]], out_tr, mask=there)

        @pl.when(part == self.grid[0] - 1)
        def _() -> None:
            shared = span(0, padded(self.shared_dim))[None]
            there = (token < self.queries) & (shared < self.shared_dim)
            at = out_ref.at[token, head, self.latent + shared]
            plt.store(at, project(self.nope_dim, self.shared_dim), mask=there)
