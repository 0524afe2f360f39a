"""Projections that share a launch: every rule over the reference and the kernel under interpretation."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.linear import api, pallas
from kimi_jax.ops.linear.tile import PROGRAMS, choose_tile
from kimi_jax.ops.linear.weights import Gated

BETAS = 4.0, 25.0

SIZES = (
    ((1,), 96, (5, 33)),
    ((1, 1), 2080, (3,)),  # two passes and a part of one
    ((1,), 9 * 1024, (2, 1)),  # more passes than are written out
    ((7,), 160, (17, 40, 1)),
    ((2, 9), 288, (33,)),
    ((64,), 32, (7,)),
)
"""Rows, inner width, output channels of each weight; none fills its tiles."""


@cache
def compiled(op, impl, *statics):
    return jax.jit(partial(getattr(api, op), impl=impl), static_argnames=statics)


def sample(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def exact(x, weight):
    return np.float64(x) @ np.float64(weight).T


def situ(gate, up, beta, linear_beta):
    a, b = np.float64(gate), np.float64(up)
    return beta * np.tanh(a / beta) / (1 + np.exp(-a)) * linear_beta * np.tanh(b / linear_beta)


def normalised(x, scale, eps):
    wide = np.float64(x)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * np.float64(scale)


def assert_close(got, expected, tolerance):
    np.testing.assert_allclose(np.float64(got), expected, rtol=0, atol=tolerance * np.abs(expected).max())


class LinearContract:
    """What every implementation must do. Subclasses set `impl`. Tolerances are of the largest result."""

    impl: str
    float32, bfloat16 = 5e-6, 2.0**-8

    def many(self, x, factors, dtypes=None):
        return compiled("project_many", self.impl, "dtypes")(x, factors, dtypes=dtypes)

    @settings(max_examples=14, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(st.integers(0, 9), st.sampled_from(SIZES))
    def test_every_weight_against_float64(self, seed, sizes):
        # red when a program takes another weight's tile, the last tile is dropped, or the end of the inner width is read twice
        rows, inner, widths = sizes
        x = sample(seed, (*rows, inner), jnp.bfloat16)
        weights = [sample(100 + seed + i, (width, inner), jnp.bfloat16) for i, width in enumerate(widths)]
        outs = self.many(x, weights, (jnp.float32,) * len(weights))
        assert [out.shape for out in outs] == [(*rows, width) for width in widths]
        for out, weight in zip(outs, weights, strict=True):
            # of a result of usual size: a single one may be near zero, where its many summands cancel
            usual = inner**0.5
            np.testing.assert_allclose(out, exact(x, weight), rtol=0, atol=2 * self.float32 * usual)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_each_result_has_its_dtype_and_is_rounded_once(self, rows):
        x, weights = sample(0, (rows, 96), jnp.bfloat16), [sample(i, (200, 96), jnp.bfloat16) for i in (1, 2)]
        wide, narrow = self.many(x, weights, (jnp.float32, jnp.bfloat16))
        assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
        assert_close(
            wide, exact(x, weights[0]), self.float32
        )  # red (1e-3) when a router's logits pass through bfloat16
        once = jnp.asarray(exact(x, weights[1]), jnp.bfloat16)
        assert np.mean(np.asarray(narrow == once)) > 0.99
        assert self.many(x, weights)[0].dtype == x.dtype

    @pytest.mark.parametrize("rows", [1, 5])
    def test_float32_weights_keep_every_digit(self, rows):
        x, weight = sample(0, (rows, 96), jnp.bfloat16), sample(1, (33, 96))
        (out,) = self.many(x, [weight], (jnp.float32,))
        assert_close(out, exact(x, weight), self.float32)  # red (1e-3) when the operands meet in the dtype of the input

    @pytest.mark.parametrize("rows", [(1,), (2, 5)])
    def test_two_products_meet_in_situ(self, rows):
        x = sample(0, (*rows, 160))
        plain, gate, up = (sample(seed, (37, 160)) * scale for seed, scale in ((1, 1.0), (2, 0.3), (3, 2.0)))
        together = jax.jit(lambda x, w, *two: api.project_many(x, [w, Gated(*two, *BETAS)], impl=self.impl))
        first, gated = together(x, plain, gate, up)
        assert_close(first, exact(x, plain), self.float32)
        # red when gate and up are swapped, or their tiles counted twice
        assert_close(gated, situ(exact(x, gate), exact(x, up), *BETAS), 1e-5)

    @settings(max_examples=6, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(st.integers(0, 9), st.sampled_from([((1, 1), 2080), ((3, 5), 288)]))
    def test_a_normalised_input_and_what_stands_beside_it(self, seed, sizes):
        rows, inner = sizes
        x, scale, weight = 30 * sample(seed, (*rows, inner)), sample(1, inner), sample(2, (9, inner))
        y = 5 * sample(3, (*rows, 9))
        # red when the mean is over the padding or what stands beside, or eps is left out
        expected = exact(normalised(x, scale, 0.5), weight)
        assert_close(compiled("project_normed", self.impl, "eps")(x, scale, weight=weight, eps=0.5), expected, 5e-6)
        joined = jnp.concatenate([x, y], axis=-1)
        out = compiled("project_and_add", self.impl, "eps")(joined, scale, weight=weight, eps=0.5)
        assert_close(out, expected + np.float64(y), 5e-6)  # red when a tile is added to another

    @pytest.mark.parametrize(("rows", "width"), [((1,), 5000), ((2, 3), 700)])
    def test_a_product_beside_another_array(self, rows, width):
        x, weight = sample(0, (*rows, 96), jnp.bfloat16), sample(1, (9, 96), jnp.bfloat16)
        left = sample(2, (*rows, width))
        out = compiled("project_beside", self.impl)(left, x, weight)
        assert out.dtype == x.dtype and out.shape == (*rows, width + 9)
        # red when the two overlap, or the last block of columns is not moved
        np.testing.assert_array_equal(out[..., :width], left.astype(x.dtype))
        assert_close(out[..., width:], exact(x, weight), self.bfloat16)

    @pytest.mark.parametrize(("rows", "width", "first", "inner"), [((1,), 2080, 1040, 300), ((3, 5), 288, 48, 96)])
    def test_a_part_of_a_norm_and_another_row_in_one_sum(self, rows, width, first, inner):
        x, scale, y = 30 * sample(0, (*rows, width)), sample(1, width), sample(2, (*rows, inner))
        weight, other = sample(3, (9, width // 3)), sample(4, (9, inner))
        part = normalised(x, scale, 0.5)[..., first : first + width // 3]
        run = compiled("project_pair", self.impl, "eps")
        out = run(x, scale, first=jnp.int32(first), weight=weight, y=y, other=other, eps=0.5)
        # red when the mean is over the part alone, the part or the norm's weight begins elsewhere, or a product is left out
        assert_close(out, exact(part, weight) + exact(y, other), 5e-6)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_a_bfloat16_norm_is_rounded_before_its_weight(self, rows):
        x, scale = sample(0, (rows, 160), jnp.bfloat16), sample(1, 160, jnp.bfloat16)
        out = compiled("project_normed", self.impl, "eps")(x, scale, weight=jnp.eye(160, dtype=jnp.bfloat16), eps=1e-5)
        expected = jnp.asarray(normalised(x, 1.0, 1e-5), jnp.bfloat16) * scale
        assert_close(out, np.float64(expected), self.bfloat16)

    def test_a_row_does_not_see_another(self):
        x, weight, scale = sample(0, (5, 96)), sample(1, (9, 96)), jnp.ones(96)
        poisoned = x.at[2].set(jnp.nan)
        normed = compiled("project_normed", self.impl, "eps")
        for run in (lambda x: self.many(x, [weight])[0], lambda x: normed(x, scale, weight=weight, eps=1e-5)):
            clean, got = np.asarray(run(x)), np.asarray(run(poisoned))
            np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(clean, 2, axis=0))
            assert np.isnan(got[2]).all()

    def test_a_long_input_is_xlas(self):
        x, weight = sample(0, (pallas.MOST_ROWS + 1, 96)), sample(1, (9, 96))
        got, expected = self.many(x, [weight])[0], compiled("project_many", "reference")(x, [weight])[0]
        np.testing.assert_array_equal(got, expected)


class TestReference(LinearContract):
    impl = "reference"


class TestInterpret(LinearContract):
    impl = "interpret"


@pytest.mark.parametrize(
    ("inner", "channels"),
    [(7168, 6284), (1536, 7168), (7168, 6016), (3584, 7168), (768, 7168), (7168, 3648), (1536, 2304), (7168, 20480)],
)
def test_a_single_row_fills_the_chip(inner, channels):
    # K3's products on one of eight devices. Red when a program takes more channels than the chip has programs for.
    tile = choose_tile(1, inner, channels)
    assert channels // tile.channels >= PROGRAMS
    assert inner % tile.inner == 0  # no mask


@pytest.mark.parametrize(("rows", "inner"), [(2, 7168), (16, 1536), (16, 768), (17, 3584), (64, 7168)])
def test_several_rows_fill_the_chip_too(rows, inner):
    # Narrowest but one of K3's products on one of eight devices. Red with 32 channels, or more passes for few rows.
    tile = choose_tile(rows, inner, 2304 + 1536)
    assert (2304 + 1536) / tile.channels >= 240 and rows <= tile.rows
    assert inner % tile.inner == 0  # no mask
    assert tile.inner == (512 if rows <= 16 and inner != 768 else 256)


@pytest.mark.parametrize("rows", [1, 5])
def test_results_that_are_sent_keep_every_bit(rows):
    # red when the halves of a number change places, or the second result lies on the first
    x, widths = sample(0, (rows, 96), jnp.bfloat16), (5, 33, 7)
    weights = [sample(seed, (width, 96), jnp.bfloat16) for seed, width in enumerate(widths)]
    words, (beside,) = jax.jit(partial(api.project_words, impl="interpret"))(x, *weights)
    expected = compiled("project_many", "interpret", "dtypes")(
        x, weights, dtypes=(jnp.float32, jnp.bfloat16, jnp.bfloat16)
    )
    bits = [np.asarray(out).view(np.uint16) for out in expected[:2]]
    np.testing.assert_array_equal(words, np.concatenate(bits, axis=-1))
    np.testing.assert_array_equal(beside, expected[2])


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_kernels_do_not_round_rows_for_narrower_weights(eps):
    # Red when float32 rows become bfloat16 without a word; the reference keeps every digit.
    x, wide, weight = jnp.ones((3, 32)), jnp.ones((4, 32)), jnp.ones((4, 32), jnp.bfloat16)
    inputs = [x] if eps is None else [x, jnp.ones((1, 32))]
    with pytest.raises(ValueError, match=r"round float32 rows to bfloat16; what works: .*reference"):
        pallas.project(inputs, [wide, weight], dtypes=(jnp.float32,) * 2, eps=eps, interpret=True)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"linear\.project_many has no implementation 'fast'; built: .*reference"):
        api.project_many(jnp.ones((1, 2)), [jnp.ones((2, 2))], impl="fast")
