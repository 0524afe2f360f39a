from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kimi_jax.ops.situ import api


def oracle(gate, up, beta, linear_beta):
    a, b = np.float64(gate), np.float64(up)
    with np.errstate(over="ignore"):
        gated = beta * np.tanh(a / beta) / (1 + np.exp(-a))
    return gated * (b if linear_beta is None else linear_beta * np.tanh(b / linear_beta))


class SituContract:
    """What every implementation of situ must do. Subclasses set `situ`."""

    tolerance = 2e-6

    def test_golden(self, k3_golden):
        gate, up, out = (k3_golden[f"situ/{name}"] for name in ("gate", "up", "out_4_25"))
        got = self.situ(gate, up, 4.0, 25.0)  # red when the sigmoid reads the squashed gate, or betas are swapped
        assert np.isfinite(got).all()  # gates and ups of +-3e38 among them
        np.testing.assert_allclose(got, out, rtol=0, atol=self.tolerance * 100)
        line = self.situ(k3_golden["situ/line_gate"], np.full(601, 3, np.float32), 4.0, 25.0)
        np.testing.assert_allclose(line, k3_golden["situ/line_out_up3"], rtol=0, atol=self.tolerance * 12)

    def test_both_halves_are_bounded(self):
        got = self.situ(np.float32([10]), np.float32([100]), 4.0, 25.0)
        np.testing.assert_allclose(got, 98.5908, rtol=1e-6)  # PF-15: the SiLU form gives 999.95

    def test_halves_are_not_interchangeable(self):
        a, b = np.float32([2.0]), np.float32([-3.0])  # red when gate and up are swapped
        np.testing.assert_allclose(self.situ(a, b, 4.0, 25.0), oracle(a, b, 4, 25), rtol=1e-5)
        assert abs(self.situ(a, b, 4.0, 25.0)[0] - self.situ(b, a, 4.0, 25.0)[0]) > 1

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(
        hnp.arrays(np.float32, (2, 5), elements=st.floats(-200, 200, width=32)),
        st.floats(0.5, 50),
        st.none() | st.floats(0.5, 50),
    )
    def test_against_float64(self, halves, beta, linear_beta):
        got = self.situ(halves[:1], halves[1:], beta, linear_beta)  # red when None still squashes the linear half
        expected = oracle(halves[:1], halves[1:], beta, linear_beta)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=self.tolerance * beta * (linear_beta or 200))

    def test_bfloat16_is_rounded_once(self):
        random = np.random.default_rng(0)
        gate, up = (jnp.asarray(random.normal(0, scale, 4000), jnp.bfloat16) for scale in (4, 25))
        got = self.situ(gate, up, 4.0, 25.0)
        assert got.dtype == jnp.bfloat16
        once = jnp.asarray(oracle(np.asarray(gate), np.asarray(up), 4, 25), jnp.bfloat16)
        assert np.mean(np.asarray(got) == np.asarray(once)) > 0.99  # red when the product runs in bfloat16 (under 0.6)


class TestReference(SituContract):
    situ = staticmethod(partial(api.situ, impl="reference"))


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"situ has no implementation 'fast'; built: .*reference"):
        api.situ(jnp.ones(2), jnp.ones(2), 4.0, 25.0, impl="fast")
