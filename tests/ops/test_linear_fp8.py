"""Products with FP8 weights: the same rules over the reference and the kernel under interpretation."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.linear import api
from kimi_jax.ops.linear.weights import Gated, Scaled
from kimi_jax.quant import fp8

BETAS = 4.0, 25.0


@cache
def compiled(op, impl, *statics):
    return jax.jit(partial(getattr(api, op), impl=impl), static_argnames=statics)


def rows_of(seed, rows, inner, dtype=jnp.bfloat16):
    """Rows whose largest value is 448 times a power of two of their own: their scales divide without rounding."""
    x = np.random.default_rng(seed).uniform(-300, 300, (rows, inner)).astype(np.float32)
    x[np.arange(rows), np.arange(rows) * 7 % inner] = 448 * (-1) ** np.arange(rows)
    return jnp.asarray(x * 2.0 ** (np.arange(rows) % 5 - 9)[:, None], dtype)


def weight_of(seed, out, inner):
    rng = np.random.default_rng(seed)
    codes = rng.uniform(-448, 448, (out, inner)).astype(ml_dtypes.float8_e4m3fn)
    return Scaled(jnp.asarray(codes), jnp.asarray(rng.uniform(1e-4, 1e-2, out), jnp.float32))


def exact(x, weight):
    """The published formula in float64."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    codes = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return codes @ np.float64(weight.codes).T * np.float64(scale) * np.float64(weight.scale)


def assert_close(got, expected, tolerance):
    largest = np.abs(expected).max(axis=1, keepdims=True)
    np.testing.assert_allclose(np.float64(got) / largest, expected / largest, rtol=0, atol=tolerance)


@pytest.fixture(params=["reference", "interpret"])
def impl(request):
    return request.param


@pytest.mark.parametrize(("rows", "inner"), [(1, 1100), (1, 9 * 1024), (5, 288)])
def test_rows_and_weights_have_scales_of_their_own(impl, rows, inner):
    # Red when rows share a scale, an output channel takes its neighbour's, a part of a pass is rounded with its own, or rows
    # stay unrounded (1e-2).
    x, weights = rows_of(0, rows, inner), [weight_of(i, width, inner) for i, width in enumerate((5, 33))]
    outs = compiled("project_many", impl, "dtypes")(x, weights, dtypes=(jnp.float32,) * 2)
    for out, weight in zip(outs, weights, strict=True):
        assert_close(out, exact(x, weight), 5e-6)


@pytest.mark.parametrize("rows", [1, 5])
def test_plain_and_fp8_weights_share_a_launch(impl, rows):
    # Red when the plain weight meets rounded rows, or the halves of a gated MLP swap.
    x = rows_of(0, rows, 160, jnp.float32)
    plain, gate, up = (
        jnp.asarray(np.random.default_rng(1).normal(size=(9, 160)), jnp.float32),
        *map(lambda seed: weight_of(seed, 37, 160), (2, 3)),
    )
    together = jax.jit(lambda x, w, *two: api.project_many(x, [w, Gated(*two, *BETAS)], impl=impl))
    first, gated = together(x, plain, gate, up)
    assert_close(first, np.float64(x) @ np.float64(plain).T, 5e-6)
    a, b = exact(x, gate), exact(x, up)
    assert_close(gated, BETAS[0] * np.tanh(a / BETAS[0]) / (1 + np.exp(-a)) * BETAS[1] * np.tanh(b / BETAS[1]), 1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_rounded_after_their_norm(impl, rows):
    # Red (1e-2) when what is rounded is the row before its norm, or what stands beside takes part in the scale.
    x, norm, weight = rows_of(0, rows, 320, jnp.float32), jnp.linspace(0.1, 9, 320), weight_of(1, 9, 320)
    wide = np.float64(x)
    normal = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 0.5) * np.float64(norm)
    expected, beside = exact(normal, weight), 1e4 * jnp.ones((rows, 9))
    # a value between two codes may fall either way
    assert_close(compiled("project_normed", impl, "eps")(x, norm, weight=weight, eps=0.5), expected, 2e-3)
    joined = jnp.concatenate([x, beside], axis=-1)
    out = compiled("project_and_add", impl, "eps")(joined, norm, weight=weight, eps=0.5)
    assert_close(out - beside, expected, 2e-3)
    left = jnp.ones((rows, 40))
    joined = compiled("project_beside", impl)(left, x, weight)
    np.testing.assert_array_equal(joined[:, :40], left)
    assert_close(joined[:, 40:], exact(x, weight), 5e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_of_zeros_gives_zeros_and_a_broken_one_breaks_alone(impl, rows):
    # Red when a scale of zero divides, or a NaN is rounded to a number.
    x, weight = rows_of(0, rows, 96, jnp.float32), weight_of(1, 9, 96)
    run = compiled("project_many", impl)
    assert not np.asarray(run(jnp.zeros_like(x), [weight])[0]).any()
    broken = np.asarray(run(x.at[0, 40].set(jnp.nan), [weight])[0])
    assert np.isnan(broken[0]).all() and np.isfinite(broken[1:]).all()


def test_codes_are_the_nearest_values_of_the_format():
    # Red when a cast truncates or passes through float16; all values between two neighbours at and around their middle.
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, middle, np.nextafter(middle, 0), np.nextafter(middle, 999)], dtype=np.float32)
    got = np.asarray(jax.jit(fp8.to_codes)(jnp.asarray(x)[None], jnp.ones(1)))[0]
    np.testing.assert_array_equal(got.view(np.uint8), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
