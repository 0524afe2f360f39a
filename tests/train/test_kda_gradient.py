"""Gradients of the chunked delta rule against central differences of the recurrence in float64 (text-model section 3.1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.kda import api

ROWS, TOKENS, HEADS, DIM = 2, 21, 2, 4
LENGTHS = np.array([21, 18])
NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "state")


def recurrence(q, k, v, f, b, A_log, dt_bias, state):
    """Token by token, as the notes write it."""
    out = np.zeros_like(v)
    for row, length in enumerate(LENGTHS):
        for head in range(HEADS):
            S = state[row, head].copy()
            for t in range(length):
                x, y = q[row, t, head], k[row, t, head]
                x, y = x / np.sqrt(x @ x + 1e-6) * DIM**-0.5, y / np.sqrt(y @ y + 1e-6)
                g = -5 / (1 + np.exp(-np.exp(A_log[head]) * (f[row, t, head] + dt_bias[head])))
                S = np.exp(g)[:, None] * S
                S = S + np.outer(y, v[row, t, head] - S.T @ y) / (1 + np.exp(-b[row, t, head]))
                out[row, t, head] = S.T @ x
    return out


@pytest.mark.parametrize("gate", [-6.0, 0.0, 6.0], ids=["keeps", "mixed", "forgets"])
def test_chunks_have_the_gradient_of_the_recurrence(gate):
    # red when a gradient is stopped anywhere in the op, or the decay between two tokens of a chunk is off by one
    random = np.random.default_rng(0)
    shape = ROWS, TOKENS, HEADS, DIM
    inputs = [random.standard_normal(shape) for _ in range(4)]
    inputs[3] = inputs[3] + gate  # log decays near 0, between, and near -5
    inputs += [random.standard_normal(shape[:3]), 0.3 * random.standard_normal(HEADS)]
    inputs += [random.standard_normal((HEADS, DIM)), random.standard_normal((ROWS, HEADS, DIM, DIM))]
    weight = random.standard_normal(shape)

    def chunked(*given):
        out, _ = api.kda(*given, jnp.asarray(LENGTHS), lower_bound=-5.0, form="chunked")
        return jnp.sum(out * jnp.asarray(weight, jnp.float32))

    gradient = jax.jit(jax.grad(chunked, argnums=tuple(range(8))))(*(jnp.asarray(x, jnp.float32) for x in inputs))
    for place, name in enumerate(NAMES):
        step = 1e-5 * random.standard_normal(inputs[place].shape)
        ends = [[*inputs[:place], inputs[place] + sign * step, *inputs[place + 1 :]] for sign in (1, -1)]
        slope = np.sum(weight * (recurrence(*ends[0]) - recurrence(*ends[1]))) / 2e-5
        got = np.sum(np.asarray(gradient[place], np.float64) * step / 1e-5)
        scale = np.linalg.norm(gradient[place]) + 1e-2
        assert abs(got - slope) < 1e-3 * scale, name
