"""KDA in plain XLA: the recurrence token by token, and 16 tokens at a time for prefill (text-model section 3.1)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

CHUNK = 16
"""Most tokens per chunk. Exponents reach 8 tokens from its middle: exp(+-40) at the released bound of -5."""

NORM_EPS = 1e-6
"""Added to the sum of squares, under the root (text-model section 3.1)."""

State = Float[Array, "rows heads key value"]
Real = Bool[Array, "rows tokens"]
Inputs = tuple[Array, Array, Array, Array, Array]
Gate = Callable[[Array], Array]


class Tokens(NamedTuple):
    """What the recurrence reads, in float32. A padded token holds zeros, so that it neither decays nor writes."""

    q: Float[Array, "rows tokens heads key"]
    k: Float[Array, "rows tokens heads key"]
    v: Float[Array, "rows tokens heads value"]
    g: Float[Array, "rows tokens heads key"]
    beta: Float[Array, "rows tokens heads"]


def kda(
    q: Float[Array, "rows tokens heads key"],
    k: Float[Array, "rows tokens heads key"],
    v: Float[Array, "rows tokens heads value"],
    f: Float[Array, "rows tokens heads key"],
    b: Float[Array, "rows tokens heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    state: State,
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float | None,
    chunked: bool,
) -> tuple[Float[Array, "rows tokens heads value"], State]:
    """See ``api.kda``; ``chunked`` chooses the form."""
    real = jnp.arange(q.shape[1]) < lengths[:, None]
    gate = partial(log_decay, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    out, state = (_by_chunk if chunked else _by_token)((q, k, v, f, b), gate, real, state)
    return jnp.where(real[..., None, None], out, 0), state


def log_decay(
    f: Float[Array, "*tokens heads key"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    lower_bound: float | None,
) -> Float[Array, "*tokens heads key"]:
    """Log of the factor by which a token shrinks each key channel of the state: float32, from ``lower_bound`` to 0."""
    slope, logit = jnp.exp(A_log)[:, None], f.astype(jnp.float32) + dt_bias
    if lower_bound is None:
        return -slope * jax.nn.softplus(logit)
    return lower_bound * jax.nn.sigmoid(slope * logit)


def prepare(inputs: Inputs, gate: Gate, real: Real) -> Tokens:
    """Gates and unit-length queries and keys of the real tokens."""

    def real_only(x: Array) -> Array:
        mask = real.reshape(*real.shape, *(1,) * (x.ndim - 2))
        return jnp.where(mask, x.astype(jnp.float32), 0)

    q, k, v, f, b = (real_only(x) for x in inputs)
    g, beta = real_only(gate(f)), real_only(jax.nn.sigmoid(b))
    return Tokens(unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, beta)


def unit(x: Float[Array, "*tokens key"]) -> Float[Array, "*tokens key"]:
    """Vectors scaled to unit length, zeros to zeros; also inside kernels."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def _by_token(inputs: Inputs, gate: Gate, real: Real, state: State) -> tuple[Array, State]:
    tokens = prepare(inputs, gate, real)
    if real.shape[1] == 1:
        state, out = _token_step(state, Tokens(*(x[:, 0] for x in tokens)), real[:, 0])
        return out[:, None], state
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, real))
    state, out = lax.scan(lambda carry, x: _token_step(carry, *x), state, by_time)
    return jnp.moveaxis(out, 0, 1), state


def _token_step(
    state: State, token: Tokens, real: Bool[Array, " rows"]
) -> tuple[State, Float[Array, "rows heads value"]]:
    """One token of every row; the state is read by one product and written once, which is what this step costs."""
    new, (out, _) = write_step(state, token)
    return jnp.where(real[:, None, None, None], new, state), out


def write_step(state: State, token: Tokens) -> tuple[State, tuple[Array, Array]]:
    """One token of every row without a mask: the new state, the output, and what the token wrote along its key."""
    q, k, v, g, beta = token
    decay = jnp.exp(g)
    # Both reads of the decayed state are one product with the undecayed one: the decay moves to the vectors.
    read = _dot("bnik,bnkv->bniv", jnp.stack([q * decay, k * decay], axis=2), state)
    delta = beta[..., None] * (v - read[:, :, 1])
    out = read[:, :, 0] + jnp.sum(q * k, axis=-1, keepdims=True) * delta
    return state * decay[..., None] + k[..., None] * delta[..., None, :], (out, delta)


def _by_chunk(inputs: Inputs, gate: Gate, real: Real, state: State) -> tuple[Array, State]:
    """A scan over chunks that does everything inside, so that a chunk's intermediates stay in cache."""
    rows, count = real.shape
    size = min(CHUNK, 1 << (count - 1).bit_length())
    chunks = -(-count // size)

    def by_chunk(x: Array) -> Array:
        whole = jnp.pad(x, [(0, 0), (0, chunks * size - count)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(whole.reshape(rows, chunks, size, *x.shape[2:]), 1, 0)

    def step(state: State, chunk: tuple[Inputs, Real]) -> tuple[State, Array]:
        inputs, real = chunk
        new, out = _chunk_step(state, prepare(inputs, gate, real))
        some = real[:, :1, None, None]  # padding is a row's tail: a chunk with a real token begins with one
        return jnp.where(some, new, state), out

    state, out = lax.scan(step, state, jax.tree.map(by_chunk, (inputs, real)))
    return jnp.moveaxis(out, 0, 1).reshape(rows, chunks * size, *out.shape[3:])[:, :count], state


class _Chunk(NamedTuple):
    """One chunk of every row on its way, head by head: outputs, writes, keys over ``up``, and two decays."""

    out: Float[Array, "rows heads tokens value"]
    writes: Float[Array, "rows heads tokens value"]
    lowered: Float[Array, "rows heads tokens key"]
    to_middle: Float[Array, "rows heads key"]
    to_end: Float[Array, "rows heads key"]


def _chunk_step(state: State, tokens: Tokens) -> tuple[State, Float[Array, "rows tokens heads value"]]:
    """One chunk of every row: the state after it, and its outputs."""
    chunk = _chunk(state, tokens)
    added = _dot("bnjk,bnjv->bnkv", chunk.lowered, chunk.writes)
    state = (state * chunk.to_middle[..., None] + added) * chunk.to_end[..., None]
    return state, _by_head(chunk.out)


def chunk_writes(state: State, tokens: Tokens) -> tuple[Array, Array]:
    """Outputs and writes of up to ``CHUNK`` tokens of every row, each [rows, tokens, heads, value]; the state stays as it is."""
    count = tokens.g.shape[1]
    size = 1 << (count - 1).bit_length()
    whole = Tokens(*(jnp.pad(x, [(0, 0), (0, size - count)] + [(0, 0)] * (x.ndim - 2)) for x in tokens))
    chunk = _chunk(state, whole)
    return _by_head(chunk.out)[:, :count], _by_head(chunk.writes)[:, :count]


def _chunk(state: State, tokens: Tokens) -> _Chunk:
    """The products of one chunk.

    ``up`` is the decay from the middle of the chunk to a token, above 1 for tokens before it; the decay from token j to
    token i is ``up[i] / up[j]``. So all pairs are one product: queries and keys times ``up`` with keys over ``up``.
    """
    q, k, v, g, beta = tokens
    size, middle = g.shape[1], g.shape[1] // 2
    up = jnp.exp(_sums_from_middle(g))
    to_middle, to_end = jnp.exp(jnp.sum(g[:, :middle], axis=1)), up[:, -1]
    raised, lowered = _by_head(jnp.concatenate([q * up, k * up], axis=1)), _by_head(k / up)
    v, beta = _by_head(v), _by_head(beta[..., None])

    pairs = _dot("bnid,bnjd->bnij", raised, lowered)
    row, column = np.indices((size, size))
    reads = jnp.where(row >= column, pairs[:, :, :size], 0)  # a token also reads its own write
    overlaps = jnp.where(row > column, pairs[:, :, size:], 0) * beta

    before = _dot("bnik,bnkv->bniv", raised * to_middle[:, :, None], state)
    writes = _dot("bnij,bnjv->bniv", unit_lower_inverse(overlaps), (v - before[:, :, size:]) * beta)
    out = before[:, :, :size] + _dot("bnij,bnjv->bniv", reads, writes)
    return _Chunk(out, writes, lowered, to_middle, to_end)


def _by_head(x: Float[Array, "rows a b dim"]) -> Float[Array, "rows b a dim"]:
    return jnp.swapaxes(x, 1, 2)


def _sums_from_middle(g: Float[Array, "rows tokens heads key"]) -> Float[Array, "rows tokens heads key"]:
    """Sum of ``g`` from the middle to each token, its own included; for tokens before, minus what lies between."""
    size, middle = g.shape[1], g.shape[1] // 2
    token, at = np.indices((size, size))
    signs = np.where(at >= middle, at <= token, 0) - np.where(at < middle, at > token, 0)
    return _dot("ij,bjm->bim", jnp.asarray(signs, jnp.float32), g.reshape(*g.shape[:2], -1)).reshape(g.shape)


def unit_lower_inverse(strict: Float[Array, "*batch size size"]) -> Float[Array, "*batch size size"]:
    """Inverse of I + ``strict``, which is strictly lower triangular and whose size is a power of two.

    Forward substitution by blocks: the inverses of two neighbours and the block below the first give the inverse of
    twice the size. Unlike (I - A)(I + A^2)(I + A^4)..., whose powers grow like binomials, it is good for repeated keys.
    """
    size = strict.shape[-1]
    row, column = np.indices((size, size))
    apart = row ^ column
    inverse = jnp.eye(size) - jnp.where(apart == 1, strict, 0)
    width = 2
    while width < size:
        below = jnp.where(apart // width == 1, strict, 0)  # rows in the second, columns in the first half of 2 * width
        inverse = inverse - _dot("...ij,...jk->...ik", inverse, _dot("...ij,...jk->...ik", below, inverse))
        width *= 2
    return inverse
