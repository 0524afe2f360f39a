import re
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.kda import api
from kimi_jax.problems import ProblemsError


def make(seed, *, rows=3, tokens=9, channels=5, taps=4):
    random = np.random.default_rng(seed)
    x, window = random.normal(size=(rows, tokens, channels)), random.normal(size=(rows, taps - 1, channels))
    return x.astype(np.float32), window.astype(np.float32), random.normal(size=(channels, 1, taps)).astype(np.float32)


def oracle(x, window, weight, lengths):
    """In float64; the window by what it means: the last inputs of the old window and the real tokens."""
    out, kept = np.zeros(x.shape), []
    taps = weight.shape[-1]
    for row, length in enumerate(lengths):
        seen = np.concatenate([window[row], x[row, :length]])
        for t in range(length):
            mixed = np.einsum("tc,ct->c", np.float64(seen[t : t + taps]), np.float64(weight[:, 0]))
            out[row, t] = mixed / (1 + np.exp(-mixed))
        kept.append(seen[len(seen) - taps + 1 :])
    return out, np.stack(kept)


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


every_subclass = settings(suppress_health_check=[HealthCheck.differing_executors])


class ShortConvContract:
    """What every implementation of short_conv must do. Subclasses set `conv`."""

    def test_golden(self, k3_golden):
        x, weight, out = (k3_golden[f"conv/{name}"] for name in ("x", "w", "out"))
        window = np.zeros((1, 3, 6), np.float32)
        got, kept = self.conv(x[None], window, weight, np.int32([11]))  # red with the taps reversed, or without SiLU
        np.testing.assert_allclose(got[0], out, rtol=0, atol=1e-5 * np.abs(out).max())
        assert same_bits(kept[0], x[-3:])  # red when the window holds results instead of inputs

    @every_subclass
    @given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def test_ragged_rows(self, seed, lengths):
        x, window, weight = make(seed)
        got, kept = self.conv(x, window, weight, np.int32(lengths))
        out, expected = oracle(x, window, weight, lengths)
        np.testing.assert_allclose(got, out, rtol=0, atol=1e-5)
        assert same_bits(kept, expected)  # PF-06: lengths 0, 1, 2; red when the window is the tail of x

    @pytest.mark.parametrize("junk", (1e4, np.nan, np.inf))
    @pytest.mark.parametrize("tokens", (1, 2, 9))
    def test_padding_never_matters(self, tokens, junk):
        x, window, weight = make(1, tokens=tokens)
        lengths = np.int32([0, 1, tokens])
        window[0, 0] = np.nan, -0.0, np.inf, 1e-40, 1  # an idle slot may hold anything, and keeps it
        dirty = np.where(np.arange(tokens)[:, None] >= lengths[:, None, None], np.float32(junk), x)
        clean, got = self.conv(x, window, weight, lengths), self.conv(dirty, window, weight, lengths)
        assert all(same_bits(a, b) for a, b in zip(clean, got, strict=True))  # PF-03; red with 0 * padding
        assert same_bits(got[1][0], window[0])
        assert not np.asarray(got[0])[np.arange(tokens) >= lengths[:, None]].any()

    @every_subclass
    @given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 9))
    def test_split_anywhere(self, seed, one, other):
        x, window, weight = make(seed, rows=1)
        cuts = [0, *sorted((one, other)), 9]
        whole, kept = self.conv(x, window, weight, np.int32([9]))
        parts = []
        for start, stop in pairwise(cuts):
            part = np.full_like(x, np.nan)
            part[:, : stop - start] = x[:, start:stop]
            out, window = self.conv(part, window, weight, np.int32([stop - start]))
            parts.append(out[:, : stop - start])
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-6)
        assert same_bits(window, kept)

    @pytest.mark.parametrize("taps", (2, 3, 5))
    def test_other_widths(self, taps):
        x, window, weight = make(2, taps=taps)
        got, kept = self.conv(x, window, weight, np.int32([0, 4, 9]))
        out, expected = oracle(x, window, weight, [0, 4, 9])
        np.testing.assert_allclose(got, out, rtol=0, atol=1e-5)
        assert same_bits(kept, expected)

    def test_bfloat16_is_rounded_once(self):
        x, window, weight = make(3, rows=1, tokens=2000)
        x, window = jnp.asarray(x, jnp.bfloat16), jnp.asarray(window, jnp.bfloat16)
        got, kept = self.conv(x, window, weight, np.int32([2000]))
        assert got.dtype == kept.dtype == jnp.bfloat16
        once = jnp.asarray(oracle(np.float32(x), np.float32(window), weight, [2000])[0], jnp.bfloat16)
        assert np.mean(np.asarray(got) == np.asarray(once)) > 0.99  # red when weights or sums are bfloat16
        assert same_bits(kept, x[:, -3:])

    def test_window_keeps_its_dtype(self):
        x, window, weight = make(4)
        narrow = jnp.asarray(x, jnp.bfloat16)
        got, kept = self.conv(narrow, window, weight, np.int32([0, 1, 2]))
        assert (got.dtype, kept.dtype) == (jnp.bfloat16, jnp.float32)
        assert same_bits(
            kept, oracle(np.float32(narrow), window, weight, [0, 1, 2])[1]
        )  # red when it is rounded to x.dtype

    @pytest.mark.parametrize("platform", ("cpu", "cuda", "rocm"))
    def test_lowering(self, platform):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*make(5), np.int32([1, 2, 3]))]
        text = jax.jit(self.conv).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert not re.search("custom_call|convolution|dot_general", text)


class TestReference(ShortConvContract):
    conv = staticmethod(jax.jit(partial(api.short_conv, impl="reference")))


def test_problems_are_reported_together():
    x, window, weight = make(0)
    with pytest.raises(ProblemsError) as error:
        api.short_conv(x, window[:2], weight.astype(jnp.bfloat16)[:, 0, None, :3], np.float32([1, 2]))
    for part in (
        "window has shape [2, 3, 5], not [3, 2, 5]",
        "lengths has shape [2], not [3]",
        "weight is bfloat16, not float32",
        "lengths is float32, not an integer type",
    ):
        assert part in str(error.value)
    assert len(error.value.problems) == 4


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"short_conv has no implementation 'fast'; built: .*reference"):
        jax.jit(partial(api.short_conv, impl="fast"))(*make(0), np.int32([1, 1, 1]))
