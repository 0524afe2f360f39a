"""Where MXFP4 weights are FP8 weights: every code under every scale byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kimi_jax.quant import mxfp4
from kimi_jax.quant.mxfp4_to_fp8 import exact_by_row, exact_in_fp8, to_fp8

CODES = np.tile(np.arange(16, dtype=np.uint8), 2)
PACKED = CODES[0::2] | CODES[1::2] << 4
"""A group that holds every code."""


def test_the_exact_exponents_are_all_and_no_more():
    # Red when a bound of the window moves by one; all 16 codes under all 256 bytes, against the format's own rounding.
    with np.errstate(over="ignore"):
        values = np.array(mxfp4.E2M1) * np.exp2(np.arange(256.0) - 127)[:, None]
        held = values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = (held == values).all(axis=1)
    exact[mxfp4.NAN_SCALE] = False
    np.testing.assert_array_equal(exact_in_fp8(jnp.arange(256, dtype=jnp.uint8)), exact)
    assert np.flatnonzero(exact).tolist() == list(range(119, 134))


def test_a_row_within_the_window_is_converted_exactly():
    # Red when a row's scale is another power of two, nibbles swap, or the mask is wider than the truth.
    pairs = np.array([(top, top - below) for top in (0, 7, 21, 127, 140, 254) for below in range(19) if top >= below])
    scale = jnp.asarray(pairs, jnp.uint8)
    packed = jnp.broadcast_to(jnp.asarray(np.tile(PACKED, 2)), (len(pairs), 32))
    codes, row = jax.jit(to_fp8)(packed, scale)
    got = np.asarray(codes).astype(np.float64) * np.asarray(row, np.float64)[:, None]
    powers = np.exp2(pairs.astype(np.float64) - 127)
    expected = np.repeat(powers, 32, axis=1) * np.tile(np.array(mxfp4.E2M1)[CODES], 2)
    exact = (got == expected).all(axis=1)
    mask = np.asarray(exact_by_row(scale))
    np.testing.assert_array_equal(exact, mask)
    assert (
        mask[(pairs[:, 0] >= 21) & (np.ptp(pairs, axis=1) <= 14)].all() and not mask[np.ptp(pairs, axis=1) > 14].any()
    )
    # what is not exact is off by half a step at most
    assert (np.abs(got - expected) <= np.asarray(row)[:, None] * 2.0**-10).all()


def test_a_broken_group_breaks_its_row():
    # Red when a NaN becomes a number.
    scale = jnp.asarray([[127, mxfp4.NAN_SCALE], [127, 127]], jnp.uint8)
    codes, row = to_fp8(jnp.zeros((2, 32), jnp.uint8), scale)
    assert np.isnan(np.asarray(row)).tolist() == [True, False] == (~np.asarray(exact_by_row(scale))).tolist()
    assert codes.shape == (2, 64)
