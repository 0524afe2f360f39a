from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kimi_jax.ops.moe import api

CASES = ["random", "bias_flips", "negative_bias", "all_equal", "tie_at_cut", "bias_tie", "saturated", "vanishing"]
CASES += ["k3_size", "scaled"]


compiled = cache(lambda **options: jax.jit(partial(api.route, **options)))


@pytest.fixture(params=["reference", "interpret"], scope="module")
def route(request):
    """Every implementation, under one contract."""
    return partial(call, impl=request.param)


def call(logits, bias, top_k, *, renormalize=True, scale=1.0, real=None, impl):
    run = compiled(top_k=top_k, renormalize=renormalize, scale=scale, impl=impl)
    ids, weights = run(jnp.asarray(logits), jnp.asarray(bias), real=real)
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def scattered(ids, weights, experts):
    dense = np.zeros((len(ids), experts))
    np.put_along_axis(dense, ids, weights, axis=-1)
    return dense


@pytest.mark.parametrize("case", CASES)
def test_golden(route, k3_golden, case):
    stored = {
        name: k3_golden[f"router/{case}/{name}"] for name in ("logits", "bias", "k", "scale", "idx", "w", "dense")
    }
    logits, bias = stored["logits"], stored["bias"]
    ids, weights = route(logits, bias, int(stored["k"]), scale=float(stored["scale"]))
    biased = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    if case == "saturated":  # scores that differ in float64 only: any choice among them is right
        cut = np.take_along_axis(biased, stored["idx"], -1)[:, -1:]
        assert (np.take_along_axis(biased, ids, -1) >= cut - 1e-6).all()
        np.testing.assert_allclose(weights.sum(-1), stored["w"].sum(-1), rtol=1e-6)
        return
    # red when the weights are taken from the biased scores, not divided by their sum, or not scaled
    np.testing.assert_allclose(scattered(ids, weights, logits.shape[1]), stored["dense"], rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(ids, stored["idx"])  # red with ascending order, or ties to the higher id


@settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.function_scoped_fixture])
@given(
    logits=hnp.arrays(np.float32, (3, 7), elements=st.floats(-8, 8, width=32) | st.sampled_from([0, 1])),
    bias=hnp.arrays(np.float32, 7, elements=st.sampled_from([-2, -1, 0, 0.5])),
    top_k=st.sampled_from([1, 4, 7]),
    renormalize=st.booleans(),
)
def test_against_a_stable_sort(route, logits, bias, top_k, renormalize):
    ids, weights = route(logits, bias, top_k, renormalize=renormalize, scale=2.5)
    scores = np.asarray(jax.nn.sigmoid(jnp.asarray(logits)))
    expected = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(ids, expected)  # red when negative biased scores are masked, or ties go up
    chosen = np.take_along_axis(scores, expected, -1).astype(np.float64)
    total = chosen.sum(-1, keepdims=True) if renormalize else 1.0
    np.testing.assert_allclose(weights, chosen / total * 2.5, rtol=1e-6)


def test_biases_that_bfloat16_would_merge_stay_apart(route):
    # PF-19: red when scores + bias pass through bfloat16, which keeps about 9 of the 238
    bias = np.random.default_rng(0).permutation(np.linspace(6.817, 7.063, 238).astype(np.float32))
    assert len(set(bias.tolist())) == 238
    ids, _ = route(np.zeros((2, 238), np.float32), bias, 238)
    np.testing.assert_array_equal(ids, [np.argsort(-bias)] * 2)


@pytest.mark.parametrize(("logits", "bias"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_narrow_inputs_are_refused(logits, bias):
    with pytest.raises(ValueError, match="is bfloat16, not float32"):
        api.route(jnp.zeros((1, 4), logits), jnp.zeros(4, bias), 2, renormalize=True, scale=1.0)


def test_all_problems_are_named():
    with pytest.raises(ValueError, match=r"logits is bfloat16.*bias is float16.*top_k is 5 of 4"):
        api.route(jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros(4, jnp.float16), 5, renormalize=True, scale=1.0)


def test_weights_without_mass_stay_finite(route):
    ids, weights = route(np.full((1, 6), -3e38, np.float32), np.zeros(6, np.float32), 3)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.tolist() == [[0, 0, 0]]  # red without the 1e-20


def test_a_nan_row_leaves_the_others_alone(route):
    logits = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    bias = np.zeros(16, np.float32)
    ids, weights = route(logits, bias, 4)
    logits[2] = np.nan
    poisoned_ids, poisoned = route(logits, bias, 4)
    assert ((poisoned_ids >= 0) & (poisoned_ids < 16)).all()
    assert np.isnan(poisoned[2]).all()
    rest = [0, 1, 3, 4]
    np.testing.assert_array_equal(poisoned[rest], weights[rest])
    np.testing.assert_array_equal(poisoned_ids[rest], ids[rest])


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_row_does_not_depend_on_its_batch(route, rows):
    random = np.random.default_rng(0)
    logits, bias = random.normal(size=(64, 896)).astype(np.float32), random.normal(size=896).astype(np.float32)
    ids, weights = route(logits, bias, 16)
    some_ids, some = route(logits[:rows], bias, 16)
    np.testing.assert_array_equal(some_ids, ids[:rows])  # PF-20
    np.testing.assert_array_equal(some, weights[:rows])


def test_padding_goes_to_no_expert(route):
    logits, bias = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32), np.zeros(16, np.float32)
    ids, weights = route(logits, bias, 4)
    real = np.array([True, False, True, True, False])
    padded_ids, padded = route(logits, bias, 4, real=real)
    np.testing.assert_array_equal(padded_ids, np.where(real[:, None], ids, 16))  # red when real is read upside down
    np.testing.assert_array_equal(padded, weights)
