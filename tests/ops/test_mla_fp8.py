"""Latent attention with kv_b in FP8: what it computes with the weight's values, in every form."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.linear.weights import Scaled
from kimi_jax.ops.mla import sparse
from kimi_jax.quant import fp8
from tests.ops.mla_contract import NOPE, compiled, make


def weight_and_case(tokens):
    case = make(3, [70, 130], tokens=tokens, length=160)
    # channels of very different size: no scale can stand for another
    wide = case.expand * np.exp2(np.arange(len(case.expand)) % 7)[:, None]
    codes, scale = fp8.quantise(jnp.asarray(wide))
    values = np.float32(codes) * np.float32(scale)[:, None]
    return Scaled(codes, scale, np.dtype(np.float32)), jnp.asarray(values), case


@pytest.mark.parametrize(
    ("form", "impl"), [("absorbed", "reference"), ("absorbed", "interpret"), ("direct", "interpret")]
)
def test_kv_b_is_read_as_its_values(form, impl):
    # Red when a channel takes another's scale, the key part has none, or the codes are taken for the values.
    weight, values, case = weight_and_case(tokens=3)
    run = compiled(form, impl)
    got, expected = (run(case.query, case.cache, w, case.positions, case.lengths) for w in (weight, values))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_chosen_rows_too():
    # Red as above.
    weight, values, case = weight_and_case(tokens=2)
    chosen = jnp.broadcast_to(jnp.arange(20), (2, 2, 20))
    got, expected = (
        sparse.attend_selected(jnp.asarray(case.query), jnp.asarray(case.cache), w, chosen, nope_dim=NOPE)
        for w in (weight, values)
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
