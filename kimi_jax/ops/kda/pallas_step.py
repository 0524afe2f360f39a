"""One launch for a decode step: a program does everything of one head of one row, with the state in registers.

A verification is the same launch with records in the place of a new state; ``fold`` applies those of the tokens that stay.
It reads its state once and writes it once, in place, and it owns its head's channels of the convolution windows, so no program
reads what another writes. The output norm needs all value channels of a head, so they are not dealt to several programs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.ops.kda.output import gated_norm
from kimi_jax.ops.kda.reference import unit
from kimi_jax.ops.linear.weights import Scaled
from kimi_jax.ops.once import once
from kimi_jax.quant.fp8 import E4M3, LARGEST, SMALLEST_SCALE

MOST_TOKENS = 8
"""Tokens of a row that one launch takes: a drafted block and the token before it. The loop over them is unrolled."""

WARPS = 8
"""A lane of 64 holds 32 values of a state of 128 x 128."""


@once
def step(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float,
    eps: float,
    interpret: bool,
) -> tuple[
    Float[Array, "rows tokens channels"],
    Float[Array, "rows streams taps_less_one channels"],
    Float[Array, "rows heads dim dim"],
]:
    """See ``api.attend``."""
    operands = (lengths, *projected, *weights, windows, state)
    written = (projected.v, windows, state)
    leaves = len(jax.tree.leaves(operands))
    return pl.pallas_call(
        partial(_kernel, lower_bound=lower_bound, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for like in written],
        grid=state.shape[:2],
        input_output_aliases={leaves - 2: 1, leaves - 1: 2},
        interpret=interpret,
        name="kda_step",
        compiler_params=None if interpret else plt.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*operands)


@once
def verify(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float,
    eps: float,
    interpret: bool,
) -> tuple[Float[Array, "rows tokens channels"], tuple[Array, Array, Array, Array]]:
    """See ``rollback.verify``: the output, and the records k, g, u and inputs."""
    operands = (lengths, *projected, *weights, windows, state)
    rows, tokens, _ = projected.v.shape
    record = jax.ShapeDtypeStruct((rows, tokens, *state.shape[1:3]), jnp.float32)
    inputs = jax.ShapeDtypeStruct((*windows.shape[:2], tokens, windows.shape[3]), windows.dtype)
    out, *records = pl.pallas_call(
        partial(_kernel, lower_bound=lower_bound, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(projected.v.shape, projected.v.dtype), record, record, record, inputs],
        grid=state.shape[:2],
        interpret=interpret,
        name="kda_verify",
        compiler_params=None if interpret else plt.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*operands)
    k, g, u, raw = records
    return out, (k, g, u, raw)


@once
def fold(
    state: Float[Array, "rows heads dim dim"],
    windows: Float[Array, "rows streams taps_less_one channels"],
    records: tuple[Array, Array, Array, Array],
    counts: Int[Array, " rows"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows heads dim dim"], Float[Array, "rows streams taps_less_one channels"]]:
    """State and windows once the first ``counts`` tokens of a verified block are in, in place; see ``rollback.fold``."""
    return pl.pallas_call(
        _fold_kernel,
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for like in (state, windows)],
        grid=state.shape[:2],
        input_output_aliases={5: 0, 6: 1},
        interpret=interpret,
        name="kda_fold",
        compiler_params=None if interpret else plt.CompilerParams(num_warps=WARPS, num_stages=1),
    )(counts, *records, state, windows)


def _fold_kernel(counts: Any, k: Any, g: Any, u: Any, raw: Any, state: Any, windows: Any, *out: Any) -> None:
    new_state, new_windows = out
    row, head = pl.program_id(0), pl.program_id(1)
    count, tokens, dim = counts[row], k.shape[1], state.shape[-1]
    channels = pl.ds(head * dim, dim)

    @pl.when(count > 0)
    def _() -> None:
        state_kv = state[row, head, :, :]
        for t in range(tokens):
            decayed = state_kv * jnp.exp(g[row, t, head, :])[:, None]
            written = decayed + k[row, t, head, :][:, None] * u[row, t, head, :][None, :]
            state_kv = jnp.where(t < count, written, state_kv)
        new_state[row, head, :, :] = state_kv
        for stream in range(windows.shape[1]):
            seen = [windows[row, stream, slot, channels] for slot in range(windows.shape[2])]
            seen += [raw[row, stream, t, channels] for t in range(tokens)]
            _store_window(new_windows, (row, stream), channels, seen, count, tokens)


def _store_window(window: Any, at: tuple[Any, Any], channels: Any, seen: list[Any], length: Any, tokens: int) -> None:
    """Keeps the last inputs of one stream after ``length`` tokens, 1 to ``tokens``."""
    for slot in range(len(seen) - tokens):
        # Token i is seen[taps - 1 + i]: after `length` tokens the window begins at seen[length].
        kept = seen[slot + tokens]
        for count in range(tokens - 1, 0, -1):
            kept = jnp.where(length <= count, seen[slot + count], kept)
        window[*at, slot, channels] = kept.astype(window.dtype)


def _kernel(lengths: Any, *refs: Any, lower_bound: float, eps: float) -> None:
    projected, weights, (windows, state) = Projected(*refs[:6]), Weights(*refs[6:13]), refs[13:15]
    out, *after = refs[15:]
    records = after if len(after) == 4 else None  # a verification: k, g, u and raw inputs
    row, head = pl.program_id(0), pl.program_id(1)
    length = lengths[row]
    tokens, dim, taps = out.shape[1], weights.norm.shape[0], windows.shape[2] + 1
    channels = pl.ds(head * dim, dim)

    @pl.when(length <= 0)
    def _() -> None:
        for t in range(tokens):
            out[row, t, channels] = jnp.zeros(dim, out.dtype)
            if records is not None:
                for record in records[:3]:
                    record[row, t, head, :] = jnp.zeros(dim, jnp.float32)
                for stream in range(windows.shape[1]):
                    records[3][row, stream, t, channels] = jnp.zeros(dim, windows.dtype)

    @pl.when(length > 0)
    def _() -> None:
        filters = (weights.q_conv, weights.k_conv, weights.v_conv)
        taps_of = [[weight[channels, 0, tap] for tap in range(taps)] for weight in filters]
        inputs = [
            [windows[row, stream, slot, channels] for slot in range(taps - 1)]
            + [_load(x, (row, np.int32(t), channels), dim, t < length) for t in range(tokens)]
            for stream, x in enumerate((projected.q, projected.k, projected.v))
        ]
        widen, slope = _widening(weights.decay, channels), jnp.exp(weights.A_log[head])
        dt_bias, norm = weights.dt_bias[head, :], weights.norm[:]
        state_kv = state[row, head, :, :]

        for t in range(tokens):
            real = t < length
            q, k, v = (
                _activated(inputs[stream][t : t + taps], taps_of[stream], out.dtype) for stream in range(len(inputs))
            )
            latent = _load(projected.latent, (row, np.int32(t), slice(None)), weights.decay.shape[1], real)
            f = widen(latent.astype(jnp.float32)).astype(out.dtype).astype(jnp.float32)
            g = lower_bound * jax.nn.sigmoid(slope * (f + dt_bias))
            decay = jnp.exp(g)
            beta = jax.nn.sigmoid(projected.b[row, t, head].astype(jnp.float32))
            q, k = unit(q) * dim**-0.5, unit(k)

            # Both reads are of the undecayed state, so that neither waits for the other: the decay moves to the vectors.
            read_q = jnp.sum(state_kv * (q * decay)[:, None], axis=0)
            read_k = jnp.sum(state_kv * (k * decay)[:, None], axis=0)
            delta = beta * (v - read_k)
            state_kv = jnp.where(real, state_kv * decay[:, None] + k[:, None] * delta[None, :], state_kv)
            mixed = (read_q + jnp.sum(q * k) * delta).astype(out.dtype)
            gate = _load(projected.gate, (row, np.int32(t), channels), dim, real)
            out[row, t, channels] = jnp.where(real, gated_norm(mixed, gate, norm, eps), 0)
            if records is not None:
                for record, value in zip(records, (k, g, delta), strict=False):
                    record[row, t, head, :] = jnp.where(real, value, 0)
                for stream, seen in enumerate(inputs):
                    records[3][row, stream, t, channels] = seen[taps - 1 + t].astype(windows.dtype)

        if records is None:
            new_windows, new_state = after
            new_state[row, head, :, :] = state_kv
            for stream, seen in enumerate(inputs):
                _store_window(new_windows, (row, stream), channels, seen, length, tokens)


def _widening(decay: Any, channels: Any) -> Callable[[jax.Array], jax.Array]:
    """From one token's latent to the gate logits of some channels, float32."""
    if not isinstance(decay, Scaled):
        decay_kr = decay[channels, :].astype(jnp.float32)
        return lambda latent: jnp.sum(decay_kr * latent[None, :], axis=1)
    codes_kr, scale_k = decay.codes[channels, :].astype(jnp.float32), decay.scale[channels]

    def widen(latent: jax.Array) -> jax.Array:
        scale = jnp.maximum(jnp.max(jnp.abs(latent)) / LARGEST, SMALLEST_SCALE)
        rounded = (latent / scale).astype(E4M3).astype(jnp.float32)
        return jnp.sum(codes_kr * rounded[None, :], axis=1) * (scale_k * scale)

    return widen


def _load(ref: Any, at: tuple[Any, ...], size: int, real: Any) -> jax.Array:
    """A vector, zeros where the token is padding: what lies there is never read."""
    return plt.load(ref.at[at], mask=jnp.broadcast_to(real, (size,)), other=0)


def _activated(seen: list[jax.Array], taps: list[jax.Array], dtype: Any) -> jax.Array:
    """One token of a short convolution with SiLU, float32 rounded through the activation dtype."""
    mixed = sum(x.astype(jnp.float32) * tap for x, tap in zip(seen, taps, strict=True))
    return jax.nn.silu(mixed).astype(dtype).astype(jnp.float32)
