"""Latent attention (MLA without positions): queries of many heads over one cached row per token.

A cached row is the normalised latent followed by the key part that all heads share. Source: text-model section 3.2.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.linear.weights import Matrix, Scaled
from kimi_jax.ops.mla import absorb as absorb_kernel
from kimi_jax.ops.mla import entry, kernels, reference
from kimi_jax.ops.mla.absorb import Absorbed as Absorbed
from kimi_jax.ops.mla.absorb import Query as Query
from kimi_jax.ops.mla.absorb import scale_of as scale_of
from kimi_jax.ops.mla.entry import Latents as Latents
from kimi_jax.ops.mla.launch import check_cache
from kimi_jax.ops.mla.write import NewRows as NewRows

Form = Literal["auto", "direct", "absorbed"]

DIRECT_FROM = 64
"""Queries per row from which expanding the rows to per-head keys and values costs less than absorbed scores."""


def attend(
    query: Query,
    cache: Float[Array, "pool page row_dim"],
    expand: Matrix,
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    *,
    nope_dim: int,
    gate: Float[Array, "rows tokens heads value_dim"] | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    form: Form = "auto",
    impl: str = "reference",
) -> Float[Array, "rows tokens heads value_dim"]:
    """Causal softmax attention of every query over the cached rows up to its own position.

    Args:
      query: per head, the part matched with expanded keys (``nope_dim``) and the part matched with the shared key; or the same
        as :func:`absorb_and_write` gives them, which is for kernels and the absorbed form.
      cache: rows already written for these tokens, [rows, length, row_dim], or a pool of pages with a table ``pages``; rows at
        ``lengths`` and beyond may hold anything, also NaN.
      expand: kv_b weight, head-major: ``nope_dim`` key rows, then the value rows of each head; an FP8 one is read as its values.
      positions: position of each query; a negative one marks padding and gives zeros.
      lengths: written rows of each sequence, the current tokens included.
      nope_dim: width of a head's own key.
      gate: logits of the output gate; the result is then multiplied by their sigmoid and has their dtype.
      pages: int32, for each sequence the pages of ``cache`` that hold its rows, in order; all must exist.
      form: ``direct`` expands rows to keys and values, ``absorbed`` moves the expansion to the query and the result; ``auto``
        chooses by the number of queries. Equal up to rounding.

    Returns:
      Attention output, float32 before the output gate; the scale is ``query_dim ** -0.5``.

    Raises:
      ValueError: pages or a cache that the kernels cannot address.
    """
    if form == "auto":
        form = "direct" if query.shape[1] >= DIRECT_FROM else "absorbed"
    run = _choose("attend", impl, reference.attend, kernels.attend, cache, pages)
    with jax.named_scope(f"mla_{form}"):
        return run(
            query,
            cache,
            expand,
            positions,
            lengths,
            nope_dim=nope_dim,
            absorbed=form == "absorbed",
            gate=gate,
            pages=pages,
        )


def absorb(
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    *,
    nope_dim: int,
    impl: str = "reference",
) -> Float[Array, "rows tokens heads row_dim"]:
    """Queries in the coordinates of a cached row, in ``expand.dtype``: their product with a row is the score before scaling."""
    return _choose("absorb", impl, reference.absorb, absorb_kernel.absorb)(query, expand, nope_dim=nope_dim)


def absorbs_early(tokens: int, impl: str) -> bool:
    """Whether a call of ``tokens`` queries a row writes its rows through :func:`absorb_and_write`."""
    return impl != "reference" and tokens < DIRECT_FROM


def absorb_and_write(
    cache: Float[Array, "pool page row_dim"],
    query: Float[Array, "rows tokens heads query_dim"],
    expand: Matrix,
    new: NewRows,
    *,
    nope_dim: int,
    eps: float,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str,
) -> tuple[Absorbed, Float[Array, "pool page row_dim"]]:
    """:func:`absorb` and ``cache.write_rows`` in one launch; XLA has no such form.

    Args:
      cache: written in place.
      eps: of the norm of the new rows.

    Raises:
      ValueError: pages or a cache that the kernels cannot address; ``impl`` is not a kernel's.
    """
    built = {
        "pallas": absorb_kernel.absorb_and_write,
        "interpret": partial(absorb_kernel.absorb_and_write, interpret=True),
    }
    run = choose("mla.absorb_and_write", impl, built)
    with jax.named_scope("mla_absorb"):
        rows, cache = run(cache, query, expand, new, pages, nope_dim=nope_dim, eps=eps)
    return Absorbed(rows), cache


def enters(latent: Float[Array, "rows tokens q_rank"], weight: Matrix, impl: str) -> bool:
    """Whether :func:`project_absorb_and_write` takes a call.

    Args:
      latent: what queries are projected from.
      weight: q_b; its FP8 form meets rows rounded to FP8, which is another launch's work, and no other form may round them.
    """
    rows, tokens, _ = latent.shape
    few = absorbs_early(tokens, impl) and rows * tokens <= entry.MOST_QUERIES
    return few and not isinstance(weight, Scaled) and jnp.promote_types(latent.dtype, weight.dtype) == weight.dtype


def project_absorb_and_write(
    cache: Float[Array, "pool page row_dim"],
    query: Latents,
    expand: Matrix,
    new: NewRows,
    *,
    nope_dim: int,
    query_eps: float,
    eps: float,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str,
) -> tuple[Absorbed, Float[Array, "pool page row_dim"]]:
    """:func:`absorb_and_write` of queries that are projected in the same launch, where :func:`enters`.

    Args:
      query_eps: of the norm before the projection.
      cache, expand, new, nope_dim, eps, pages, impl: as for :func:`absorb_and_write`.
    """
    built = {
        "pallas": entry.project_absorb_and_write,
        "interpret": partial(entry.project_absorb_and_write, interpret=True),
    }
    run = choose("mla.project_absorb_and_write", impl, built)
    with jax.named_scope("mla_absorb"):
        rows, cache = run(cache, query, expand, new, pages, nope_dim=nope_dim, query_eps=query_eps, eps=eps)
    return Absorbed(rows), cache


def attend_partial(
    query: Float[Array, "rows tokens heads row_dim"],
    cache: Float[Array, "pool page row_dim"],
    positions: Int[Array, "rows tokens"],
    lengths: Int[Array, " rows"],
    *,
    latent: int,
    scale: float,
    pages: Int[Array, "rows pages"] | None = None,
    impl: str = "reference",
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """Attention over a part of the cached rows, to be joined with other parts: for a sequence cut over devices.

    Args:
      query: absorbed.
      cache, positions, lengths, pages: as for :func:`attend`, counted from the first row of this part; a query that stands before
        the part has a negative position.
      latent: width of the latent in a row; the rest is the shared key.
      scale: of the scores.

    Returns:
      Sum of latents by softmax weight over this part, and the natural logarithm of the sum of weights; zeros and -1e30
      for a query that sees no row. float32.
    """
    run = _choose("attend_partial", impl, reference.attend_partial, kernels.attend_partial, cache, pages)
    with jax.named_scope("mla_partial"):
        return run(query, cache, positions, lengths, latent=latent, scale=scale, pages=pages)


def _choose(name: str, impl: str, plain: Any, kernel: Any, cache: Any = None, pages: Any = None) -> Any:
    built = {"reference": plain, "pallas": kernel, "interpret": partial(kernel, interpret=True)}
    run = choose(f"mla.{name}", impl, built)
    if impl != "reference" and cache is not None:
        check_cache(cache, pages)
    return run
