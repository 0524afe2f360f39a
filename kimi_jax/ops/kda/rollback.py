"""KDA over a drafted block without a change of the state, and the state after as many tokens as stay.

``verify`` gives the outputs and, of every token, what it would write; ``fold`` applies the writes of the accepted ones. ``u`` of a
token depends only on tokens before it, so the records of accepted ones are right whatever is rejected later. The state is read once
by each and written once (DSpark notes, section 10, option B). With kernels each is one launch a layer.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.kda import api, output, pallas_step, reference
from kimi_jax.ops.kda.conv import short_conv
from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.ops.linear import api as linear

SMALLEST_BOUND = -5.5
"""Lowest gate bound of the form that takes all tokens at once; see ``api.SMALLEST_BOUND``."""


class Records(NamedTuple):
    """What the tokens of a block would do to the state, float32, zeros at padding; and the inputs of their convolutions.

    Attributes:
      k: keys of unit length.
      g: log decay per key channel, at most 0.
      u: what is written along the key: beta times the difference from what the decayed state held.
      inputs: raw q, k and v, [rows, 3, tokens, channels], in the dtype of the windows.
    """

    k: Float[Array, "rows tokens heads key"]
    g: Float[Array, "rows tokens heads key"]
    u: Float[Array, "rows tokens heads value"]
    inputs: Float[Array, "rows streams tokens channels"]


class Pending(NamedTuple):
    """A KDA layer between verification and commit: its cache as it was, and the records of the block."""

    conv: Float[Array, "rows streams taps_less_one channels"]
    state: Float[Array, "rows heads key value"]
    records: Records


def verify(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float | None,
    eps: float,
    impl: str = "reference",
) -> tuple[Float[Array, "rows tokens channels"], Records]:
    """As ``api.attend``, with records in the place of a new state. Tokens at ``lengths`` and beyond may hold anything.

    Kernels take as many tokens as those of a step, and layers without ``api.kernel_problems``.
    """
    if impl != "reference" and projected.v.shape[1] <= pallas_step.MOST_TOKENS:
        assert lower_bound is not None
        out, records = pallas_step.verify(
            projected, weights, windows, state, lengths, lower_bound=lower_bound, eps=eps, interpret=impl == "interpret"
        )
        return out, Records(*records)
    x, dim = projected, state.shape[-1]
    by_head = (*x.v.shape[:2], -1, dim)
    streams = (x.q, x.k, x.v)
    filters = (weights.q_conv, weights.k_conv, weights.v_conv)
    mixed = [
        short_conv(y, windows[:, index], taps, lengths)[0].reshape(by_head)
        for index, (y, taps) in enumerate(zip(streams, filters, strict=True))
    ]
    (f,) = linear.project_many(x.latent, [weights.decay], [x.latent.dtype])
    real = jnp.arange(x.v.shape[1]) < lengths[:, None]
    gate = partial(reference.log_decay, A_log=weights.A_log, dt_bias=weights.dt_bias, lower_bound=lower_bound)
    q, k, v = mixed
    tokens = reference.prepare((q, k, v, f.reshape(by_head), x.b), gate, real)
    bounded = lower_bound is not None and lower_bound >= SMALLEST_BOUND
    out, u = writes(tokens, state, at_once=bounded and x.v.shape[1] <= reference.CHUNK)
    out = output.gated_norm(out.astype(x.v.dtype), x.gate.reshape(by_head), weights.norm, eps).reshape(x.v.shape)
    inputs = jnp.stack([y.astype(windows.dtype) for y in streams], axis=1)
    return jnp.where(real[..., None], out, 0), Records(tokens.k, tokens.g, u, inputs)


def writes(
    tokens: reference.Tokens, state: Float[Array, "rows heads key value"], *, at_once: bool
) -> tuple[Float[Array, "rows tokens heads value"], Float[Array, "rows tokens heads value"]]:
    """Outputs and ``u`` of every token; all at once (a bounded gate, at most 16 tokens), or one after the other."""
    if at_once:
        return reference.chunk_writes(state, tokens)
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    _, (out, u) = jax.lax.scan(reference.write_step, state, by_time)
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(u, 0, 1)


def commit(
    pending: Pending, counts: Int[Array, " rows"], impl: str = "reference"
) -> tuple[Float[Array, "rows streams taps_less_one channels"], Float[Array, "rows heads key value"]]:
    """Windows and state once the first ``counts`` tokens of a verified block are in."""
    conv, state, records = pending
    few = records.k.shape[1] <= pallas_step.MOST_TOKENS and state.shape[-1] in api.KERNEL_DIMS
    if impl != "reference" and few:
        kept = (records.k, records.g, records.u, records.inputs)
        state, conv = pallas_step.fold(state, conv, kept, counts, interpret=impl == "interpret")
        return conv, state
    return window_after(conv, records.inputs, counts), fold(state, records, counts)


def fold(
    state: Float[Array, "rows heads key value"], records: Records, counts: Int[Array, " rows"]
) -> Float[Array, "rows heads key value"]:
    """The state after the first ``counts`` tokens of the block; bitwise the old one where there are none.

    A write decays by what follows it, so every exponent is a sum of log decays and at most 0.
    """
    taken = jnp.arange(records.g.shape[1]) < counts[:, None]
    g = jnp.where(taken[..., None, None], records.g, 0)
    after = jnp.cumsum(g[:, ::-1], axis=1)[:, ::-1]  # of a token and of all behind it
    k = jnp.where(taken[..., None, None], records.k, 0) * jnp.exp(after - g)
    written = jnp.einsum("bthk,bthv->bhkv", k, records.u, precision=jax.lax.Precision.HIGHEST)
    folded = state * jnp.exp(after[:, 0])[..., None] + written
    return jnp.where((counts > 0)[:, None, None, None], folded, state)


def window_after(
    windows: Float[Array, "rows streams taps_less_one channels"],
    inputs: Float[Array, "rows streams tokens channels"],
    counts: Int[Array, " rows"],
) -> Float[Array, "rows streams taps_less_one channels"]:
    """The last raw inputs once ``counts`` tokens of the block are in; older ones where the block is shorter than the window."""
    seen = jnp.concatenate([windows, inputs.astype(windows.dtype)], axis=2)
    cut = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, windows.shape[2], axis=1))
    return cut(seen, counts)
