"""A KDA block verified without touching the state, and the state after any number of its tokens."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.ops.kda import api, reference, rollback
from kimi_jax.ops.kda.inputs import Projected, Weights
from tests.draft.golden import case

TOKENS = 8
FOLD, WINDOW = jax.jit(rollback.fold), jax.jit(rollback.window_after)


@cache
def verify(bound):
    return jax.jit(partial(rollback.verify, lower_bound=bound, eps=1e-5))


@cache
def attend(bound):
    return jax.jit(partial(api.attend, lower_bound=bound, eps=1e-5))


@pytest.mark.parametrize("at_once", [True, False])
def test_golden_writes_and_states(at_once):
    # red when a write is folded before the decay, one token more or fewer is taken, or the key axis is confused with the value axis
    wanted = case("rollback")
    k, v, beta, g = (jnp.asarray(wanted[name])[None] for name in ("k", "v", "beta", "g"))
    tokens = reference.Tokens(jnp.zeros_like(k), k, v, g, beta)
    start = jnp.asarray(wanted["S0"])[None]
    _, u = rollback.writes(tokens, start, at_once=at_once)
    np.testing.assert_allclose(u[0], wanted["u"], atol=2e-5)
    records = rollback.Records(k, g, u, jnp.zeros((1, 3, TOKENS, 5)))
    for count in range(TOKENS + 1):
        state = FOLD(start, records, jnp.array([count]))
        np.testing.assert_allclose(state[0], wanted["states"][count], atol=2e-5)
        history = jnp.broadcast_to(wanted["conv_history"], (1, 3, 3, 5))
        inputs = jnp.broadcast_to(wanted["conv_inputs"], (1, 3, TOKENS, 5))
        window = WINDOW(history, inputs, jnp.array([count]))
        np.testing.assert_array_equal(window[0, 1], wanted["conv_after"][count])


def layer(seed, rows, heads=2, dim=16, rank=8):
    """Inputs of one layer's op for TOKENS tokens; decays reach the released bound."""
    random = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32)

    width = heads * dim
    projected = Projected(
        *(normal(rows, TOKENS, width) for _ in range(4)), normal(rows, TOKENS, rank), normal(rows, TOKENS, heads)
    )
    filters = (normal(width, 1, 4, scale=0.5) for _ in range(3))
    weights = Weights(*filters, normal(width, rank, scale=2), normal(heads), normal(heads, dim), 1 + normal(dim))
    return projected, weights, normal(rows, 3, 3, width), normal(rows, heads, dim, dim)


@settings(max_examples=12)
@given(
    st.integers(0, 2**32 - 1), st.lists(st.integers(0, TOKENS), min_size=3, max_size=3), st.sampled_from([-5.0, None])
)
def test_equals_the_plain_op_over_what_stays(seed, counts, bound):
    # red when what is rejected changes outputs before it, or leaves a trace in state or windows (PF-40)
    projected, weights, windows, state = layer(seed, rows=3)
    lengths, counts = jnp.full(3, TOKENS), jnp.array(counts)
    out, records = verify(bound)(projected, weights, windows, state, lengths)
    expected, *_ = attend(bound)(projected, weights, windows, state, lengths)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    _, window, after = attend(bound)(projected, weights, windows, state, counts)
    np.testing.assert_array_equal(WINDOW(windows, records.inputs, counts), window)
    np.testing.assert_allclose(FOLD(state, records, counts), after, atol=3e-5)


def test_padding_is_never_read():
    # red when a token beyond the length reaches an output or a record (PF-03)
    projected, weights, windows, state = layer(1, rows=2)
    lengths = jnp.array([3, 0])
    beyond = jnp.arange(TOKENS) >= lengths[:, None]
    poisoned = Projected(*(jnp.where(beyond[..., None], jnp.nan, x) for x in projected))
    for bound in (-5.0, None):
        clean = verify(bound)(projected, weights, windows, state, lengths)
        dirty = verify(bound)(poisoned, weights, windows, state, lengths)
        np.testing.assert_array_equal(clean[0], dirty[0])
        for counts in ([3, 0], [1, 0]):
            states = [FOLD(state, records, jnp.array(counts)) for _, records in (clean, dirty)]
            np.testing.assert_array_equal(*states)
            np.testing.assert_array_equal(states[0][1], state[1])


def test_kernels_keep_the_same_records_and_fold_them():
    # red when a record is taken after its write, padding leaves one, or a fold takes one token more or moves an idle row
    projected, weights, windows, state = layer(2, rows=4)
    lengths, counts = jnp.array([8, 5, 0, 8]), jnp.array([8, 3, 0, 1])
    out, records = verify(-5.0)(projected, weights, windows, state, lengths)
    run = jax.jit(partial(rollback.verify, lower_bound=-5.0, eps=1e-5, impl="interpret"))
    own, kept = run(projected, weights, windows, state, lengths)
    np.testing.assert_allclose(own, out, atol=2e-5)
    for name in ("k", "g", "u"):
        np.testing.assert_allclose(getattr(kept, name), getattr(records, name), atol=2e-5, err_msg=name)
    real = np.arange(TOKENS)[None, None, :, None] < np.asarray(lengths)[:, None, None, None]
    np.testing.assert_array_equal(kept.inputs, jnp.where(real, records.inputs, 0))
    commit = jax.jit(rollback.commit, static_argnames="impl")
    pending = rollback.Pending(windows, state, kept)
    wanted, found = commit(pending, counts), commit(pending, counts, impl="interpret")
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=2e-5)
    np.testing.assert_array_equal(found[1][2], state[2])
