import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kimi_jax.quant import mxfp4

# The table of the format standard, written out by hand: an oracle that shares nothing with the code.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)

decode = jax.jit(mxfp4.decode, static_argnums=2)
encode = jax.jit(mxfp4.encode)


def bytes_of(*values: int) -> jax.Array:
    """One group whose first bytes are given; the rest are zero."""
    return jnp.array([*values, *[0] * (16 - len(values))], jnp.uint8)


def scale_of(*values: int) -> jax.Array:
    return jnp.array(values, jnp.uint8)


def oracle(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Float64 values of packed bytes."""
    values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]))
    values[..., 0::2], values[..., 1::2] = VALUES[packed % 16], VALUES[packed // 16]
    return values * np.repeat(2.0 ** (scale.astype(np.int64) - 127), 32, axis=-1)


def assert_decoded(got: jax.Array, expected: np.ndarray) -> None:
    """Equal in the normal range of float32, infinite above it, and below it no further off than the smallest normal."""
    with np.errstate(over="ignore"):
        found = np.asarray(got).astype(np.float32).astype(np.float64)
    clipped = np.where(np.abs(expected) > LARGEST, np.copysign(np.inf, expected), expected)
    normal = (np.abs(expected) >= SMALLEST) | (expected == 0)
    np.testing.assert_array_equal(found[normal], clipped[normal])
    np.testing.assert_allclose(found[~normal], expected[~normal], rtol=0, atol=SMALLEST)


def planes_in_order(packed: jax.Array, scale: jax.Array) -> np.ndarray:
    planes = jax.jit(mxfp4.decode_planes)(packed, scale)
    return np.stack(planes, axis=-1).reshape(*packed.shape[:-1], -1) * np.float64(mxfp4.PLANE_UNIT)


def codes_decoded(packed: jax.Array, scale: jax.Array) -> jax.Array:
    return mxfp4.decode_codes(mxfp4.unpack(packed), scale)


class DecodeContract:
    """What every way to read MXFP4 must give."""

    lowest_scale: int
    """Below it values may be flushed to zero."""

    def test_worked_example(self):
        # red when the nibbles are swapped, the bias is 128, or values stay doubled
        got = self.decode(bytes_of(0x21, 0xF7), scale_of(0x7D))
        np.testing.assert_array_equal(got[:4], [0.125, 0.25, 1.5, -1.5])

    def test_even_element_is_the_low_nibble(self):
        np.testing.assert_array_equal(self.decode(bytes_of(0x21), scale_of(127))[:2], [0.5, 1.0])  # PF-22
        np.testing.assert_array_equal(self.decode(bytes_of(0x07, 0x70), scale_of(127))[:4], [6, 0, 0, 6])

    @pytest.mark.parametrize(("scale", "factor"), [(127, 1), (126, 0.5), (130, 8)])
    def test_scale_bytes(self, scale, factor):
        np.testing.assert_array_equal(self.decode(bytes_of(0x02), scale_of(scale))[0], factor)  # PF-23

    def test_every_code_under_every_scale(self):
        packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 1, 1))
        scale = np.arange(255, dtype=np.uint8).repeat(16).reshape(255, 16, 1)
        got, expected = self.decode(jnp.asarray(packed), jnp.asarray(scale)), oracle(packed, scale)
        low, exact = slice(None, self.lowest_scale), slice(self.lowest_scale, None)
        assert_decoded(got[exact], expected[exact])  # red when scale 254 turns 0 * inf into NaN
        np.testing.assert_allclose(got[low], expected[low], rtol=0, atol=6 * 2.0 ** (self.lowest_scale - 128))

    def test_golden(self, k3_golden):
        for name in ("", "groups_"):  # red when a group of a row takes the scale of another
            packed, scale, out = (k3_golden[f"mxfp4/{name}{part}"] for part in ("packed", "scale", "out"))
            keep = np.repeat(scale >= self.lowest_scale, 32, axis=-1)
            got = np.asarray(self.decode(jnp.asarray(packed), jnp.asarray(scale)))
            assert_decoded(got[keep], out[keep])

    def test_widths_must_belong_together(self):
        with pytest.raises(ValueError, match=r"need scales \(4, 3.0\)"):
            self.decode(jnp.zeros((4, 48), jnp.uint8), jnp.zeros((4, 2), jnp.uint8))


class TestDecode(DecodeContract):
    lowest_scale = 0
    decode = staticmethod(decode)

    def test_bfloat16_holds_every_value(self):
        packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (250, 1, 1))
        scale = np.arange(3, 253, dtype=np.uint8).repeat(16).reshape(250, 16, 1)
        got = mxfp4.decode(jnp.asarray(packed), jnp.asarray(scale), jnp.bfloat16)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got, np.float64), oracle(packed, scale))

    def test_scale_255_is_nan(self):
        assert np.isnan(mxfp4.decode(bytes_of(0x21), scale_of(255))).all()  # red when it becomes 2**128

    def test_sign_of_zero_is_kept(self):
        assert np.signbit(np.asarray(mxfp4.decode(bytes_of(0x08), scale_of(127)))).tolist() == [True] + [False] * 31


class TestPlanes(DecodeContract):
    lowest_scale = 16
    decode = staticmethod(planes_in_order)


class TestCodes(DecodeContract):
    lowest_scale = 2
    decode = staticmethod(jax.jit(codes_decoded))


def nearest_even(value: float) -> float:
    """The grid value nearest to a magnitude, by search; a tie goes to the even code, which is the even index."""
    distance = np.abs(MAGNITUDES - value)
    tied = np.flatnonzero(distance == distance.min())
    return MAGNITUDES[tied[0] if len(tied) == 1 or tied[0] % 2 == 0 else tied[1]]


def project(values: np.ndarray) -> np.ndarray:
    """The published projection in float64."""
    groups = values.astype(np.float64).reshape(-1, 32)
    out = np.zeros_like(groups)
    for row, group in enumerate(groups):
        largest = np.abs(group).max()
        if largest:
            scale = 2.0 ** np.clip(np.ceil(np.log2(largest / 6)), -126, 125)
            out[row] = [np.copysign(nearest_even(abs(value) / scale) * scale, value) for value in group]
    return out.reshape(values.shape)


# numbers whose ratio to the scale is exact in binary, so that ties occur
weights = hnp.arrays(
    np.float32, (2, 96), elements=st.integers(-48, 48).map(lambda n: n / 8) | st.floats(-9, 9, width=32)
)


class TestEncode:
    @given(weights, st.integers(-100, 100))
    def test_is_the_published_projection(self, values, exponent):
        values = np.where(np.abs(values) < 1e-6, 0, values) * np.float32(2.0**exponent)
        packed, scale = encode(values)  # red when ties go up, or the exponent is floored
        np.testing.assert_array_equal(oracle(np.asarray(packed), np.asarray(scale)), project(values))

    @given(weights)
    def test_encoding_again_gives_the_same_bytes(self, values):
        packed, scale = encode(values)  # red without the doubled codes: 3.2 -> 3 -> finer scale
        again = encode(decode(packed, scale))
        np.testing.assert_array_equal(again[0], packed)
        np.testing.assert_array_equal(again[1], scale)

    @given(hnp.arrays(np.uint8, (3, 64)), hnp.arrays(np.uint8, (3, 4), elements=st.integers(4, 252)))
    def test_foreign_bytes_keep_their_values(self, packed, scale):
        decoded = decode(packed, scale)
        again = encode(decoded)
        np.testing.assert_array_equal(decode(*again), decoded)
        largest = np.abs(np.asarray(decoded)).reshape(3, 4, 32).max(-1) / 2.0 ** (scale.astype(int) - 127)
        full = largest >= 4
        np.testing.assert_array_equal(np.asarray(again[1])[full], scale[full])
        np.testing.assert_array_equal(np.asarray(again[0]).reshape(3, 4, 16)[full], packed.reshape(3, 4, 16)[full])

    def test_hand_written_bytes(self):
        values = np.zeros(32, np.float32)
        values[:6] = [0.125, 0.25, 1.5, -1.5, 0.0625, -0.0625]  # the last two are ties between 0 and 0.125
        packed, scale = encode(values)
        assert scale.tolist() == [0x7D]
        assert packed.tolist()[:3] == [0x21, 0xF7, 0x80]

    def test_a_value_rounded_to_three_is_stored_with_the_finer_scale(self):
        packed, scale = encode(np.full(32, 3.25, np.float32))
        assert scale.tolist() == [126]
        assert packed.tolist() == [0x77] * 16  # 6 * 0.5

    def test_ends_of_the_range(self):
        groups = np.zeros((4, 32), np.float32)
        groups[1, 0], groups[2, 0], groups[3, 0] = LARGEST, SMALLEST, np.nan
        packed, scale = encode(groups)
        assert scale[:, 0].tolist() == [1, 252, 1, 255]
        assert packed[:, 0].tolist()[:3] == [0, 7, 2]  # zeros; saturated at 6; the smallest normal is 1 * 2**-126

    def test_width_must_be_whole_groups(self):
        with pytest.raises(ValueError, match="40 values; pad to 64"):
            mxfp4.encode(np.zeros((2, 40), np.float32))


class TestCheckScales:
    def test_names_count_and_place_of_nan(self):
        scale = np.full((3, 4), 254, np.uint8)
        assert mxfp4.check_scales("w1", scale) == []
        scale[1, 2] = scale[2, 0] = 255
        assert mxfp4.check_scales("w1", scale) == [
            "w1: 2 of 12 scale bytes are 255, which means NaN; the first at [1, 2]"
        ]
