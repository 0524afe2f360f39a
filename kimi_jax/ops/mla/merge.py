"""Joins the shares of a split attention; with kv_b, also moves the result to per-head values and through the output gate."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.ops.mla.expand import by_head, load_expand
from kimi_jax.ops.mla.launch import SMALLEST, dot, launch, limit, load, padded, span
from kimi_jax.ops.mla.reference import MASKED
from kimi_jax.ops.mla.split import LOG2_E, Shares, share_of

PARTS = 64
"""(token, share) pairs joined per step."""

TOKENS, COLUMNS = 4, 32
"""Tokens and value columns of one program; with 8 tokens it spills. Programs of other columns join the same shares again, on
compute units that are idle."""

WARPS = 8


def join(shares_ref: Any, lengths_ref: Any, token: Any, tokens: int, head: Any, heads: int, capacity: int) -> Any:
    """The joined rows [token, latent] of one head and the logarithm of their weight, inside a kernel.

    Without lengths every share was written.
    """
    value_ref, log_ref = shares_ref
    rows, shares, _, latent = value_ref.shape
    size = token.shape[0]
    step, r = max(1, PARTS // size), span(0, padded(latent))
    row_t, query_t = token // tokens, token % tokens * heads + head
    if lengths_ref is None:
        filled_t = jnp.where(row_t < rows, shares, 0)
    else:
        length_t = jnp.minimum(load(lengths_ref, row_t, limits=(rows,), other=0), capacity)
        filled_t = pl.cdiv(length_t, share_of(length_t, shares))

    def add(index: Any, state: Any) -> Any:
        top_t, weight_t, value_tr = state
        p = span(index * step, step)
        there = p[None] < filled_t[:, None]
        at = row_t[:, None], p[None], query_t[:, None]
        log_tp = load(log_ref, *at, limits=(None,) * 3, where=there, other=MASKED)
        wide = tuple(index[:, :, None] for index in at)
        value_tpr = load(
            value_ref, *wide, r[None, None], limits=(None, None, None, limit(latent)), where=there[:, :, None]
        )
        new_t = jnp.maximum(top_t, jnp.max(log_tp, axis=1))
        part_tp = jnp.where(log_tp > MASKED, jnp.exp2(log_tp - new_t[:, None]), 0.0)
        fade_t = jnp.exp2(top_t - new_t)
        added_tr = jnp.sum(value_tpr * part_tp[:, :, None], axis=1)
        return new_t, weight_t * fade_t + jnp.sum(part_tp, axis=1), value_tr * fade_t[:, None] + added_tr

    nothing = (
        jnp.full((size,), MASKED, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, padded(latent)), jnp.float32),
    )
    top_t, weight_t, value_tr = jax.lax.fori_loop(0, pl.cdiv(jnp.max(filled_t), step), add, nothing)
    some_t = jnp.where(weight_t > 0, weight_t, 1.0)
    return value_tr / some_t[:, None], jnp.where(weight_t > 0, top_t + jnp.log2(some_t), MASKED)


def merge(
    shares: Shares,
    lengths: Int[Array, " rows"] | None,
    *,
    tokens: int,
    capacity: int,
    interpret: bool,
    nothing: float = MASKED,
) -> tuple[Float[Array, "rows tokens heads latent"], Float[Array, "rows tokens heads"]]:
    """The joined rows and the natural logarithm of their weight, ``nothing`` where a query sees no row."""
    rows, _, queries, latent = shares.value.shape
    heads, count = queries // tokens, rows * tokens

    def kernel(shares_ref: Any, lengths_ref: Any, out_ref: Any, weight_ref: Any) -> None:
        head, token = pl.program_id(0), span(pl.program_id(1), 1)
        value_tr, log_t = join(shares_ref, lengths_ref, token, tokens, head, heads, capacity)
        r = span(0, padded(latent))[None]
        plt.store(out_ref.at[token[:, None], head, r], value_tr, mask=r < latent)
        plt.store(weight_ref.at[token, head], jnp.where(log_t > MASKED, log_t / LOG2_E, nothing))

    out, weight = launch(
        kernel,
        "mla_merge",
        (heads, count),
        (
            jax.ShapeDtypeStruct((count, heads, latent), jnp.float32),
            jax.ShapeDtypeStruct((count, heads), jnp.float32),
        ),
        shares,
        lengths,
        interpret=interpret,
        warps=WARPS,
    )
    return out.reshape(rows, tokens, heads, latent), weight.reshape(rows, tokens, heads)


def merge_expanded(
    shares: Shares,
    lengths: Int[Array, " rows"] | None,
    expand: Matrix,
    gate: Float[Array, "rows tokens heads value_dim"] | None,
    *,
    tokens: int,
    capacity: int,
    nope_dim: int,
    interpret: bool,
) -> Float[Array, "rows tokens heads value_dim"]:
    """The values of the joined rows: float32, or gated in the gate's dtype."""
    rows, _, queries, latent = shares.value.shape
    heads, count = queries // tokens, rows * tokens
    per_head = expand.shape[0] // heads
    value_dim = per_head - nope_dim
    size, columns = min(TOKENS, padded(count, 1)), min(COLUMNS, padded(value_dim))
    dtype = jnp.float32 if gate is None else gate.dtype

    def kernel(shares_ref: Any, lengths_ref: Any, expand_ref: Any, gate_ref: Any, out_ref: Any) -> None:
        part, head, block = (pl.program_id(axis) for axis in range(3))
        value_tr, _ = join(shares_ref, lengths_ref, span(block * size, size), tokens, head, heads, capacity)
        # copies up to what a matrix product takes; only the first is stored
        value_tr = jnp.broadcast_to(value_tr[None], (SMALLEST // size, *value_tr.shape)).reshape(SMALLEST, -1)
        v, r, t = span(part * columns, columns), span(0, padded(latent)), span(0, SMALLEST)
        limits = (None, limit(value_dim, columns) and per_head, limit(latent))
        w_vr = load_expand(expand_ref, head, nope_dim + v[:, None], r[None], limits=limits)
        out_tv = dot(value_tr.astype(w_vr.dtype), w_vr, (1, 1))
        token = block * size + t
        there = ((t < size) & (token < count))[:, None] & (v < value_dim)[None]
        at = token[:, None], head, v[None]
        if gate is not None:
            gate_tv = load(gate_ref, *at, limits=(None,) * 3, where=there).astype(jnp.float32)
            out_tv = out_tv.astype(dtype) * jax.nn.sigmoid(gate_tv).astype(dtype)
        plt.store(out_ref.at[at], out_tv.astype(dtype), mask=there)

    out = launch(
        kernel,
        "mla_merge_expand",
        (pl.cdiv(value_dim, columns), heads, pl.cdiv(count, size)),
        jax.ShapeDtypeStruct((count, heads, value_dim), dtype),
        shares,
        lengths,
        by_head(expand, heads),
        None if gate is None else gate.reshape(count, heads, value_dim),
        interpret=interpret,
        warps=WARPS,
    )
    return out.reshape(rows, tokens, heads, value_dim)
