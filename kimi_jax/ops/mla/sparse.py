"""Latent attention over chosen rows only: one set of positions per query token, shared by its heads (K3.1 Pro notes, section 5).

Always absorbed: the chosen rows of a token are gathered once and serve all heads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.chunks import by_chunks
from kimi_jax.ops.implementation import choose, ways
from kimi_jax.ops.linear.weights import Matrix, widened
from kimi_jax.ops.mla import sparse_kernels
from kimi_jax.ops.mla.absorb import Query
from kimi_jax.ops.mla.reference import absorb, einsum, gated

BYTES = 256 << 20
"""Gathered rows that exist at once, unless one token of every row needs more."""


def attend_selected(
    query: Query,
    latent: Float[Array, "pool page row_dim"],
    kv_b: Matrix,
    selected: Int[Array, "rows tokens k"],
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    budget: int = BYTES,
) -> Float[Array, "rows tokens heads value_dim"]:
    """What ``api.attend`` gives, over the rows ``selected`` only.

    Args:
      query, gate, pages, nope_dim: as for ``api.attend``.
      latent: the cache, rows or a pool of pages; rows that are not selected may hold anything, also NaN.
      kv_b: its ``expand``.
      selected: int32 positions of each query, none twice; -1 fills up. A query with none gives zeros.
      impl: which implementation runs.
      budget: bytes of gathered rows, or of parts of results where kernels gather, that may exist at once; queries run in chunks
        that fit, of at least one token a row.
    """
    run = choose("mla.attend_selected", impl, ATTEND)
    with jax.named_scope("mla_selected"):
        return run(query, latent, kv_b, selected, nope_dim=nope_dim, gate=gate, pages=pages, budget=budget)


def attend_selected_partial(
    query: Float[Array, "rows tokens heads row_dim"],
    latent: Float[Array, "pool page row_dim"],
    selected: Int[Array, "rows tokens k"],
    *,
    latent_dim: int,
    scale: float,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
    budget: int = BYTES,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """Attention over the selected rows of one part of a sequence, to be joined with other parts.

    Args:
      query: absorbed (``api.absorb``).
      latent, selected, pages, impl, budget: as for :func:`attend_selected`, counted from the first row of this part.
      latent_dim: width of the latent in a row; the rest is the shared key.
      scale: of the scores.

    Returns:
      Sum of latents by softmax weight, and the natural logarithm of the sum of weights; zeros and -inf where nothing is
      selected. float32.
    """
    run = choose("mla.attend_selected_partial", impl, PARTIAL)
    with jax.named_scope("mla_selected_partial"):
        return run(query, latent, selected, latent_dim=latent_dim, scale=scale, pages=pages, budget=budget)


def gather(
    latent: Float[Array, "pool page row_dim"],
    selected: Int[Array, "rows tokens k"],
    pages: Int[Array, "rows pages"] | None = None,
) -> Float[Array, "rows tokens k row_dim"]:
    """The selected rows as they are held; some other row where nothing is selected."""
    there = jnp.maximum(selected, 0)
    row = jnp.arange(selected.shape[0])[:, None, None]
    if pages is None:
        return latent[row, there]
    return latent[pages[row, there // latent.shape[1]], there % latent.shape[1]]


def _attend(
    query: Float[Array, "rows tokens heads query_dim"],
    latent: Float[Array, "pool page row_dim"],
    kv_b: Matrix,
    selected: Int[Array, "rows tokens k"],
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None,
    pages: Int[Array, "rows pages"] | None,
    budget: int,
) -> Float[Array, "rows tokens heads value_dim"]:
    kv_b = widened(kv_b)
    absorbed = absorb(query, kv_b, nope_dim=nope_dim)
    inner, _ = _partial(
        absorbed,
        latent,
        selected,
        latent_dim=kv_b.shape[1],
        scale=query.shape[-1] ** -0.5,
        pages=pages,
        budget=budget,
    )
    per_head = kv_b.reshape(query.shape[2], -1, kv_b.shape[1])
    # the whole weight instead of a slice of it, which would be copied at every step
    out = einsum("btnr,ndr->btnd", inner.astype(kv_b.dtype), per_head)[..., nope_dim:]
    return out if gate is None else gated(out, gate)


def _partial(
    query: Float[Array, "rows tokens heads row_dim"],
    latent: Float[Array, "pool page row_dim"],
    selected: Int[Array, "rows tokens k"],
    *,
    latent_dim: int,
    scale: float,
    pages: Int[Array, "rows pages"] | None,
    budget: int,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    rows, _, k = selected.shape

    def some(given: tuple[Array, Array]) -> tuple[Array, Array]:
        query, selected = given
        there = selected >= 0
        held = gather(latent, selected, pages)
        held = jnp.where(there[..., None], held, jnp.zeros((), held.dtype)).astype(query.dtype)
        score = jnp.where(there[:, :, None], einsum("btnr,btkr->btnk", query, held) * scale, -jnp.inf)
        top = jnp.max(score, axis=-1, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)  # or nothing selected would give not a number
        weight = jnp.exp(score - top)
        total = jnp.sum(weight, axis=-1)
        value = einsum("btnk,btkr->btnr", weight.astype(query.dtype), held[..., :latent_dim])
        return value / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top[..., 0]

    each = rows * k * query.shape[-1] * query.dtype.itemsize
    return by_chunks(some, (query, selected), (0, -1), max(1, budget // each))


ATTEND = ways(_attend, sparse_kernels.attend)
PARTIAL = ways(_partial, sparse_kernels.attend_partial)
