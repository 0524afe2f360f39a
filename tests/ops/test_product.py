"""Products with stored matrices: the same numbers whatever dtype holds the matrix, at every number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.product import FEWEST_ROWS, product, split

ROWS = [1, FEWEST_ROWS - 1, FEWEST_ROWS, FEWEST_ROWS + 1]


def matrix(rng, out=24, inner=96):
    return jnp.asarray(rng.standard_normal((out, inner)), jnp.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("held", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_product_is_exact_to_float32(rows, held, dtype):
    rng = np.random.default_rng(rows)
    weight, x = matrix(rng), jnp.asarray(rng.standard_normal((rows, 1, 96)), dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = product(x, weight.astype(held))
    assert (got.dtype, got.shape) == (jnp.float32, (rows, 1, 24))
    # red: two terms instead of three leave errors of 1e-4
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_terms_add_up_to_every_bit():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-20, 20).repeat(25), jnp.float32)
    terms = split(x)
    assert {term.dtype for term in terms} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(sum(np.asarray(term, np.float64) for term in terms), np.asarray(x, np.float64))


def test_rows_do_not_meet():
    rng = np.random.default_rng(1)
    weight, x = matrix(rng), jnp.asarray(rng.standard_normal((3, 96)), jnp.float32).at[1].set(jnp.nan)
    got = np.asarray(product(x, weight))
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()  # red: padding by copies, or rows and terms taken for each other
