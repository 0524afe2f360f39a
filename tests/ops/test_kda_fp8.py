"""The decay's widening in FP8, inside the kernel of a decode step and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.kda import api
from kimi_jax.ops.linear.weights import Scaled
from kimi_jax.quant import fp8
from tests.ops.test_kda_attend import EPS, make


def attend(case, decay, impl):
    weights = jax.tree.map(jnp.asarray, case.weights)._replace(decay=decay)
    given = jax.tree.map(jnp.asarray, (case.projected, case.windows, case.state, case.lengths))
    projected, windows, state, lengths = given
    return api.attend(projected, weights, windows, state, lengths, lower_bound=-5.0, eps=EPS, impl=impl)


@pytest.mark.slow
def test_a_step_rounds_the_decay_latent_as_a_projection_does():
    # Red when the kernel takes codes for values, scales channels by a neighbour, leaves the latent unrounded, or writes the state
    # over another operand now that one of them is two arrays.
    case = make(0, tokens=2)
    wide = case.weights.decay * np.exp2(np.arange(len(case.weights.decay)) % 5 - 4)[:, None]
    codes, scale = fp8.quantise(jnp.asarray(wide, jnp.float32))
    weight = Scaled(codes, scale, np.dtype(np.float32))
    expected, got = (attend(case, weight, impl) for impl in ("reference", "interpret"))
    for name, theirs, mine in zip(("out", "windows", "state"), expected, got, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max(), err_msg=name)
    plain = attend(case, jnp.asarray(wide, jnp.float32), "reference")
    off = np.abs(plain[2] - expected[2]).max() / np.abs(plain[2]).max()
    assert 1e-4 < off < 0.2  # it is rounded, and it is no other product
