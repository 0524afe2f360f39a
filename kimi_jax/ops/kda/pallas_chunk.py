"""The chunked form in two launches: what a chunk needs of its own tokens, all chunks side by side; then the state over chunks.

With b the running sum of log decays in a chunk, S the state before it, and A the overlaps of its keys (text-model section 3.1):

    R      = (I + A)^-1 diag(beta)
    writes = R V - (R (K exp(b))) S
    out    = (Q exp(b)) S + P writes
    S     <- exp(b_end) S + (K exp(b_end - b))^T writes

The first launch makes R V, R (K exp(b)), Q exp(b), K exp(b_end - b), the reads P and exp(b_end), which do not depend on S; the
second is four products per chunk, and value channels are dealt to programs.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.kda.reference import unit
from kimi_jax.ops.once import once

CHUNK = 32
"""Tokens whose writes are solved together: two blocks."""

BLOCK = 16
"""Tokens around one anchor of the exponents: at a bound of -5.5 they reach exp(+-44), and their products exp(88)."""

VALUES = 32
"""Value channels of one program of the second launch."""

WARPS = 4


class Chunks(NamedTuple):
    """What the first launch leaves for the second, float32, by row and head; nothing in chunks past a row's length.

    Attributes:
      query: Q exp(b).
      write: R (K exp(b)).
      key: K exp(b_end - b).
      reads: P, of a token its own and earlier ones.
      value: R V.
      decay: exp(b_end).
    """

    query: Float[Array, "rows heads tokens key"]
    write: Float[Array, "rows heads tokens key"]
    key: Float[Array, "rows heads tokens key"]
    reads: Float[Array, "rows heads tokens chunk"]
    value: Float[Array, "rows heads tokens value"]
    decay: Float[Array, "rows heads chunks key"]


@once
def chunked(
    q: Float[Array, "rows tokens heads key"],
    k: Float[Array, "rows tokens heads key"],
    v: Float[Array, "rows tokens heads value"],
    f: Float[Array, "rows tokens heads key"],
    b: Float[Array, "rows tokens heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    state: Float[Array, "rows heads key value"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float,
    interpret: bool,
) -> tuple[Float[Array, "rows tokens heads value"], Float[Array, "rows heads key value"]]:
    """See ``api.kda``; ``v.dtype`` decides how products are made (``_dot``)."""
    rows, count, heads, values = v.shape
    padding = -count % CHUNK
    inputs = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, f, b)]
    tokens, key = count + padding, q.shape[-1]
    params = None if interpret else plt.CompilerParams(num_warps=WARPS, num_stages=1)
    call = partial(pl.pallas_call, interpret=interpret, compiler_params=params)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), jnp.float32)

    shapes = Chunks(
        query=array(heads, tokens, key),
        write=array(heads, tokens, key),
        key=array(heads, tokens, key),
        reads=array(heads, tokens, CHUNK),
        value=array(heads, tokens, values),
        decay=array(heads, tokens // CHUNK, key),
    )
    chunks = call(
        partial(_chunk_kernel, lower_bound=lower_bound),
        out_shape=list(shapes),
        grid=(tokens // CHUNK, heads, rows),
        name="kda_chunks",
    )(lengths, *inputs, A_log, dt_bias)
    width = min(VALUES, values)
    out, state = call(
        partial(_carry_kernel, activation=v.dtype, width=width),
        out_shape=[array(tokens, heads, values), array(heads, key, values)],
        grid=(values // width, heads, rows),
        input_output_aliases={len(shapes) + 1: 1},
        name="kda_carry",
    )(lengths, *chunks, state)
    real = jnp.arange(count) < lengths[:, None]
    return jnp.where(real[..., None, None], out[:, :count], 0), state


def _chunk_kernel(
    lengths: Any, q: Any, k: Any, v: Any, f: Any, b: Any, A_log: Any, dt_bias: Any, *refs: Any, lower_bound: float
) -> None:
    chunks, activation = Chunks(*refs), v.dtype
    chunk, head, row = (pl.program_id(axis) for axis in range(3))
    start, length = chunk * CHUNK, lengths[row]
    tokens = pl.ds(start, CHUNK)

    @pl.when(start < length)
    def _() -> None:
        t_t1 = jnp.arange(CHUNK)[:, None]
        real_t1 = start + t_t1 < length
        t, j = _square()

        def load(x: Any) -> jax.Array:
            return jnp.where(real_t1, x[row, tokens, head, :].astype(jnp.float32), 0)

        logit_tk = jnp.exp(A_log[head]) * (load(f) + dt_bias[head, :][None, :])
        g_tk = jnp.where(real_t1, lower_bound * jax.nn.sigmoid(logit_tk), 0)
        beta_t1 = jnp.where(real_t1, jax.nn.sigmoid(b[row, tokens, head].astype(jnp.float32))[:, None], 0)
        first_k, between_k, last_k = (
            jnp.sum(jnp.where((begin <= t_t1) & (t_t1 < end), g_tk, 0), axis=0)
            for begin, end in pairwise((0, BLOCK // 2, CHUNK - BLOCK // 2, CHUNK))
        )
        chunks.decay[row, head, chunk, :] = jnp.exp(first_k + between_k + last_k)

        # From a token's anchor, the middle of its block, to the token: above 1 for tokens before it.
        up_tk = jnp.exp(_sums_from_middle(g_tk))
        from_start_tk = jnp.exp(first_k + jnp.where(t_t1 < BLOCK, 0, between_k))
        to_end_tk = jnp.exp(last_k + jnp.where(t_t1 < BLOCK, between_k, 0))

        k_tk = unit(load(k))
        lowered_jk = k_tk / up_tk
        chunks.key[row, head, tokens, :] = lowered_jk * to_end_tk

        raised_tk = unit(load(q)) * q.shape[-1] ** -0.5 * up_tk
        reads_tj = jnp.where(t >= j, _pairs(raised_tk, lowered_jk, between_k, activation), 0)
        chunks.query[row, head, tokens, :] = raised_tk * from_start_tk
        chunks.reads[row, head, tokens, :] = reads_tj

        raised_tk = k_tk * up_tk
        overlaps_tj = jnp.where(t > j, _pairs(raised_tk, lowered_jk, between_k, activation), 0)
        solved_tj = _unit_lower_inverse(overlaps_tj * beta_t1)
        write_tk = _dot(solved_tj, raised_tk * from_start_tk * beta_t1, activation)
        chunks.write[row, head, tokens, :] = write_tk
        chunks.value[row, head, tokens, :] = _dot(solved_tj, load(v) * beta_t1, activation)


def _carry_kernel(lengths: Any, *refs: Any, activation: Any, width: int) -> None:
    chunks, (state, out, new_state) = Chunks(*refs[:6]), refs[6:]
    block, head, row = (pl.program_id(axis) for axis in range(3))
    length, columns = lengths[row], pl.ds(block * width, width)

    @pl.when(length > 0)
    def _() -> None:
        def step(chunk: Any, state_kv: Any) -> Any:
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            query_tk, write_tk, key_tk, reads_tj = (x[row, head, tokens, :] for x in chunks[:4])
            writes_tv = chunks.value[row, head, tokens, columns] - _dot(write_tk, state_kv, activation)
            out_tv = _dot(query_tk, state_kv, activation) + _dot(reads_tj, writes_tv, activation)
            out[row, tokens, head, columns] = out_tv
            return state_kv * chunks.decay[row, head, chunk, :][:, None] + _dot(key_tk, writes_tv, activation, (0, 0))

        new_state[row, head, :, columns] = lax.fori_loop(0, pl.cdiv(length, CHUNK), step, state[row, head, :, columns])


def _pairs(raised_tk: Any, lowered_jk: Any, between_k: Any, activation: Any) -> jax.Array:
    """Products of tokens ``t`` with keys ``j``, decayed from j to t; good for j up to t."""
    t, j = _square()
    inside_tj = _dot(raised_tk, lowered_jk, activation, (1, 1))
    half_k = jnp.exp(between_k / 2)  # all of it on one side may be too small for float32
    across_tj = _dot(raised_tk * half_k, lowered_jk * half_k, activation, (1, 1))
    return jnp.where(t // BLOCK == j // BLOCK, inside_tj, across_tj)


def _square() -> tuple[jax.Array, jax.Array]:
    """Row and column of a chunk's square."""
    t, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return t, j


def _sums_from_middle(g_tk: Any) -> jax.Array:
    """Sum of ``g`` from the middle of a token's block to the token; for tokens before, minus what lies between."""
    half, key = BLOCK // 2, g_tk.shape[1]
    g_htk = jnp.reshape(g_tk, (CHUNK // half, half, key))
    sums_htk = jnp.cumsum(g_htk, axis=1)
    before_h11 = (jnp.arange(CHUNK // half) % 2 == 0)[:, None, None]
    return jnp.reshape(sums_htk - jnp.where(before_h11, jnp.sum(g_htk, axis=1)[:, None, :], 0), g_tk.shape)


def _dot(a: Any, b: Any, activation: Any, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product of float32 matrices.

    Beside bfloat16 activations each operand is split in two bfloat16 parts and the product of the small ones is left out: good
    to 2**-15, which is far below the rounding of the activations, for three bfloat16 products instead of float32 ones, whose
    rate on the target is a sixteenth.
    """
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    product = partial(lax.dot_general, dimension_numbers=dimensions, preferred_element_type=jnp.float32)
    if activation == jnp.float32:
        return product(a, b, precision=lax.Precision.HIGHEST)
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    return product(a_high, b_high) + (product(a_high, b_low) + product(a_low, b_high))


def _split(x: Any) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 whose sum is float32 ``x`` to 2**-16 of it."""
    # cut by bits: a compiler may drop a conversion that is undone at once
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def _unit_lower_inverse(strict_tj: Any) -> jax.Array:
    """See ``reference.unit_lower_inverse``."""
    t, j = _square()
    apart = t ^ j
    inverse = jnp.where(apart == 0, 1.0, 0.0) - jnp.where(apart == 1, strict_tj, 0)
    width = 2
    while width < CHUNK:
        below = jnp.where(apart // width == 1, strict_tj, 0)
        inverse = inverse - _dot(inverse, _dot(below, inverse, jnp.float32), jnp.float32)
        width *= 2
    return inverse
