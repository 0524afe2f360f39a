"""The two attention backbones of the published drafts, in local view: what they keep of the context, and the pass over a block.

Names are those of the draft checkpoints (DSpark notes, section 4). Heads are cut over ``draft_heads``; latent projections stay
whole.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.cache import write_rows
from kimi_jax.draft.attend import attend
from kimi_jax.draft.config import GqaSizes, MlaSizes
from kimi_jax.draft.rope import RopeConfig, Rotation, rotation
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision

Entry = tuple[Float[Array, "rows length ..."], ...]
"""Context rows of one layer: keys and values [rows, length, kv_heads, head_dim], or latent rows [rows, length, row_dim].

In pages, [pages, page, ...] of a pool in the place of [rows, length, ...].
"""


class Place(NamedTuple):
    """Where the tokens of a call stand: positions [rows, tokens], the first of each row, and how many are real.

    ``pages``: of each row in order, where context rows lie in pages.
    """

    positions: Int[Array, "rows tokens"]
    starts: Int[Array, " rows"]
    counts: Int[Array, " rows"]
    pages: Int[Array, "rows table"] | None = None


class GqaAttention(nnx.Module):
    """Queries and fewer keys and values, each with a norm per head; rotated by halves."""

    def __init__(
        self, hidden: int, sizes: GqaSizes, eps: float, rope: RopeConfig, precision: Precision, parallel: Parallel
    ) -> None:
        rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        by_head = ("draft_heads", None)
        self.q_proj = Linear(rows, hidden, by_head, precision, (sizes.heads, hidden))
        self.k_proj = Linear(kv_rows, hidden, by_head, precision, (sizes.kv_heads, hidden))
        self.v_proj = Linear(kv_rows, hidden, by_head, precision, (sizes.kv_heads, hidden))
        self.q_norm = RmsNorm(sizes.head_dim, eps, precision)
        self.k_norm = RmsNorm(sizes.head_dim, eps, precision)
        self.o_proj = Linear(hidden, rows, (None, "draft_heads"), precision, (hidden, sizes.heads))
        self.sizes, self.rope, self.parallel = sizes, rope, parallel

    @property
    def _turn(self) -> Rotation:
        return rotation(self.rope, self.sizes.head_dim, mla=False)

    def write(self, h: Float[Array, "rows tokens embed"], place: Place, entry: Entry) -> Entry:
        """The layer's cache with the keys and values of these context rows in."""
        return tuple(
            write_rows(_flat(held), _flat(new), place.starts, place.counts, pages=place.pages).reshape(held.shape)
            for held, new in zip(entry, self._kv(h, place.positions), strict=True)
        )

    def __call__(
        self, x: Float[Array, "rows drafts embed"], place: Place, entry: Entry, *, causal: bool
    ) -> Float[Array, "rows drafts embed"]:
        dim = self.sizes.head_dim
        query = self._turn(self.q_norm(_by_head(self.q_proj(x), dim)), place.positions)
        keys, values = self._kv(x, place.positions)
        grouped = query.reshape(*query.shape[:2], keys.shape[2], -1, dim)
        out = attend(
            grouped,
            (entry[0], entry[1]),
            (keys, values),
            place.starts,
            scale=dim**-0.5,
            causal=causal,
            pages=place.pages,
        )
        return self.parallel.psum(self.o_proj(out.reshape(*x.shape[:2], -1)), "draft_heads")

    def rows(self, h: Float[Array, "rows tokens embed"], positions: Int[Array, "rows tokens"]) -> Entry:
        """Context rows of these fused vectors, as :meth:`write` would store them."""
        return self._kv(h, positions)

    def _kv(self, h: Array, positions: Array) -> tuple[Array, Array]:
        dim = self.sizes.head_dim
        return self._turn(self.k_norm(_by_head(self.k_proj(h), dim)), positions), _by_head(self.v_proj(h), dim)


class MlaAttention(nnx.Module):
    """Latent attention whose shared key part is rotated by pairs; the latents are whole on every device."""

    def __init__(
        self, hidden: int, sizes: MlaSizes, eps: float, rope: RopeConfig, precision: Precision, parallel: Parallel
    ) -> None:
        heads, query = sizes.heads, sizes.nope_dim + sizes.rope_dim
        expanded = heads * (sizes.nope_dim + sizes.value_dim)
        by_head = ("draft_heads", None)
        self.q_a_proj = Linear(sizes.q_rank, hidden, (None, None), precision)
        self.q_a_layernorm = RmsNorm(sizes.q_rank, eps, precision)
        self.q_b_proj = Linear(heads * query, sizes.q_rank, by_head, precision, (heads, sizes.q_rank))
        self.kv_a_proj_with_mqa = Linear(sizes.kv_rank + sizes.rope_dim, hidden, (None, None), precision)
        self.kv_a_layernorm = RmsNorm(sizes.kv_rank, eps, precision)
        self.kv_b_proj = Linear(expanded, sizes.kv_rank, by_head, precision, (heads, sizes.kv_rank))
        out = (hidden, heads * sizes.value_dim)
        self.o_proj = Linear(*out, (None, "draft_heads"), precision, (hidden, heads))
        self.sizes, self.rope, self.parallel = sizes, rope, parallel

    @property
    def _turn(self) -> Rotation:
        return rotation(self.rope, self.sizes.rope_dim, mla=True)

    def write(self, h: Float[Array, "rows tokens embed"], place: Place, entry: Entry) -> Entry:
        """The layer's cache with the latent rows of these context rows in."""
        (held,) = entry
        return (write_rows(held, self._row(h, place.positions), place.starts, place.counts, pages=place.pages),)

    def __call__(
        self, x: Float[Array, "rows drafts embed"], place: Place, entry: Entry, *, causal: bool
    ) -> Float[Array, "rows drafts embed"]:
        sizes, turn = self.sizes, self._turn
        nope, rank = sizes.nope_dim, sizes.kv_rank
        query = _by_head(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), nope + sizes.rope_dim)
        # absorbed: a head's keys are the latents seen through its own part of kv_b
        expand = self.kv_b_proj.weight[...].reshape(-1, nope + sizes.value_dim, rank).astype(x.dtype)
        own = jnp.einsum("btnd,ndr->btnr", query[..., :nope], expand[:, :nope], precision="highest")
        joined = jnp.concatenate([own.astype(x.dtype), turn(query[..., nope:], place.positions)], axis=-1)
        row, held = self._row(x, place.positions)[:, :, None], entry[0][:, :, None]
        out = attend(
            joined[:, :, None],
            (held, held),  # cut where they are read: a slice of all of them would be a copy
            (row, row[..., :rank]),
            place.starts,
            scale=(nope + sizes.rope_dim) ** -0.5 * turn.softmax,
            causal=causal,
            pages=place.pages,
        )
        values = jnp.einsum("btnr,nvr->btnv", out[:, :, 0], expand[:, nope:], precision="highest")
        return self.parallel.psum(self.o_proj(values.reshape(*x.shape[:2], -1).astype(x.dtype)), "draft_heads")

    def rows(self, h: Float[Array, "rows tokens embed"], positions: Int[Array, "rows tokens"]) -> Entry:
        """Context rows of these fused vectors, as :meth:`write` would store them."""
        return (self._row(h, positions),)

    def _row(self, h: Array, positions: Array) -> Float[Array, "rows tokens row_dim"]:
        row, rank = self.kv_a_proj_with_mqa(h), self.sizes.kv_rank
        shared = self._turn(row[..., None, rank:], positions)[..., 0, :]
        return jnp.concatenate([self.kv_a_layernorm(row[..., :rank]), shared], axis=-1)


def _by_head(x: Float[Array, "rows tokens width"], dim: int) -> Float[Array, "rows tokens heads dim"]:
    return x.reshape(*x.shape[:2], -1, dim)


def _flat(x: Float[Array, "rows tokens heads dim"]) -> Float[Array, "rows tokens width"]:
    return x.reshape(*x.shape[:2], -1)
