from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.attn_res import api

EMBED = 24


def oracle(blocks, prefix, query, eps):
    values = np.stack([np.float64(source) for source in (*blocks, prefix)])
    scores = values @ np.float64(query) / np.sqrt(np.mean(values**2, axis=-1) + eps)
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    return (weights[..., None] * values).sum(axis=0)


def make(seed, *, sources=4, shape=(5,), scales=(1.0, 30.0, 0.1, 3.0)):
    """Finished blocks, running sum and query; each source has its own magnitude."""
    random = np.random.default_rng(seed)
    values = [scales[i % len(scales)] * random.normal(size=(*shape, EMBED)) for i in range(sources)]
    *blocks, prefix = (value.astype(np.float32) for value in values)
    return blocks, prefix, random.normal(size=EMBED).astype(np.float32)


class MixContract:
    """What every implementation of mix must do. Subclasses set `mix`."""

    tolerance = 3e-6

    def run(self, blocks, prefix, query, eps=1e-5):
        out = self.mix([jnp.asarray(block) for block in blocks], jnp.asarray(prefix), jnp.asarray(query), eps)
        assert out.shape == prefix.shape and out.dtype == prefix.dtype
        return np.asarray(out)

    def assert_right(self, blocks, prefix, query, eps=1e-5):
        expected = oracle(blocks, prefix, query, eps)
        largest = max(1e-30, *(np.abs(source).max() for source in (*blocks, prefix)))
        np.testing.assert_allclose(
            self.run(blocks, prefix, query, eps), expected, rtol=0, atol=self.tolerance * largest
        )

    def test_golden(self, k3_golden):
        blocks, p, norm, proj, out = (k3_golden[f"attnres/{name}"] for name in ("blocks", "p", "norm", "proj", "out"))
        got = self.run(list(blocks), p, norm * proj)  # one source is all zero, one is 30 times larger
        # red when the softmax runs over tokens, the values are normalised, or scores are divided by sqrt(embed)
        np.testing.assert_allclose(got, out, rtol=0, atol=1e-6 * np.abs(out).max())

    @settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(
        st.integers(0, 9),
        st.sampled_from([(1, (3,)), (2, (1,)), (5, (2, 3)), (9, (4,))]),
        st.lists(st.sampled_from([1e-4, 1e-2, 1.0, 50.0, 1e4]), min_size=1, max_size=4),
        st.sampled_from([1e-6, 1e-5, 1e-2]),
    )
    def test_against_float64(self, seed, shape, scales, eps):
        # red when eps is added outside the root: the smallest sources are below it
        self.assert_right(*make(seed, sources=shape[0], shape=shape[1], scales=scales), eps)

    def test_the_running_sum_alone_is_returned_as_it_is(self):
        blocks, prefix, query = make(0, sources=1)
        np.testing.assert_array_equal(self.run(blocks, prefix, query), prefix)

    def test_equal_sources_are_returned_unchanged(self):
        _, prefix, query = make(1)
        got = self.run([prefix] * 7, prefix, query)
        np.testing.assert_allclose(got, prefix, rtol=1e-6)  # red when weights do not sum to one

    def test_weights_do_not_depend_on_the_size_of_the_sources(self):
        blocks, prefix, query = make(2)
        got = self.run([block * 64 for block in blocks], prefix * 64, query, eps=1e-12)
        np.testing.assert_allclose(got, 64 * self.run(blocks, prefix, query, eps=1e-12), rtol=1e-4)  # red: raw scores

    def test_a_strong_query_selects_one_source(self):
        blocks, prefix, query = make(3)
        got = self.run(blocks, prefix, 1e4 * query)
        values = np.stack([*blocks, prefix])
        scores = values @ query / np.sqrt(np.mean(values**2, axis=-1) + 1e-5)
        expected = np.take_along_axis(values, scores.argmax(axis=0)[None, :, None], axis=0)[0]
        np.testing.assert_allclose(got, expected, rtol=1e-5)  # red (NaN) when the softmax is not shifted

    def test_a_token_does_not_see_another(self):
        blocks, prefix, query = make(4)
        clean = self.run(blocks, prefix, query)
        for array in (*blocks, prefix):
            array[2] = np.nan
        poisoned = self.run(blocks, prefix, query)
        np.testing.assert_array_equal(np.delete(poisoned, 2, axis=0), np.delete(clean, 2, axis=0))
        assert np.isnan(poisoned[2]).all()

    def test_inputs_may_be_bfloat16_and_are_rounded_once(self):
        blocks, prefix, query = make(5, shape=(200,))
        blocks, prefix = [jnp.asarray(block, jnp.bfloat16) for block in blocks], jnp.asarray(prefix, jnp.bfloat16)
        got = self.run(blocks, prefix, query)
        once = jnp.asarray(
            oracle([np.asarray(b, np.float32) for b in blocks], np.asarray(prefix), query, 1e-5), jnp.bfloat16
        )
        assert np.mean(got == np.asarray(once)) > 0.99  # red (0.5) when weights or sums are bfloat16


class TestMix(MixContract):
    mix = staticmethod(jax.jit(api.mix, static_argnums=3))


def site_oracle(blocks, prefix, update, query, scale, eps, norm_eps):
    """Normalised mix and running sum in float64, the sum rounded as it is kept."""
    summed = prefix if update is None else np.asarray(jnp.asarray(prefix) + jnp.asarray(update))
    mixed = oracle(blocks, summed, query, eps)
    return mixed / np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True) + norm_eps) * np.float64(scale), summed


@cache
def compiled(impl):
    return jax.jit(partial(api.mix_norm, impl=impl), static_argnames=("eps", "norm_eps"))


class SiteContract:
    """What every implementation of mix_norm must do. Subclasses set `impl`."""

    impl: str
    tolerance = 1e-5  # of values normalised to 1, times the norm's weights of up to 3

    def run(self, blocks, prefix, update, query, scale, eps=1e-5, norm_eps=1e-5):
        given = list(blocks), prefix, update, query, jnp.ones_like(query)
        out, summed = compiled(self.impl)(*given, scale=scale, eps=eps, norm_eps=norm_eps)
        assert out.shape == summed.shape == prefix.shape and out.dtype == summed.dtype == prefix.dtype
        return np.asarray(out), np.asarray(summed)

    def make(self, seed, *, sources=4, shape=(5,), embed=EMBED, update=True, scales=(1.0, 30.0, 0.1, 3.0)):
        random = np.random.default_rng(seed)
        values = [
            np.float32(scales[i % len(scales)] * random.normal(size=(*shape, embed))) for i in range(sources + update)
        ]
        *blocks, prefix = values[:sources]
        query, scale = (random.normal(size=embed).astype(np.float32) for _ in range(2))
        return blocks, prefix, values[-1] if update else None, query, np.clip(scale, -3, 3)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(
        st.integers(0, 9),
        st.sampled_from([(1, (3,), 40, True), (2, (1, 1), 7, False), (5, (2, 3), 96, True), (9, (4,), 24, True)]),
        st.lists(st.sampled_from([1e-4, 1e-2, 1.0, 50.0, 1e4]), min_size=1, max_size=4),
    )
    def test_against_float64(self, seed, sizes, scales):
        # red when the update is left out, the two eps are swapped, or the padding of the width counts in a mean
        sources, shape, embed, update = sizes
        eps = (1e-6, 1e-2)
        given = self.make(seed, sources=sources, shape=shape, embed=embed, update=update, scales=scales)
        out, summed = self.run(*given, *eps)
        expected, whole = site_oracle(*given, *eps)
        np.testing.assert_array_equal(summed, whole)
        np.testing.assert_allclose(out, expected, rtol=0, atol=self.tolerance * max(1, np.abs(expected).max()))

    def test_golden(self, k3_golden):
        blocks, p, norm, proj, out = (k3_golden[f"attnres/{name}"] for name in ("blocks", "p", "norm", "proj", "out"))
        update = np.float32(0.25) * p
        got, summed = self.run(list(blocks), p - update, update, norm * proj, np.ones_like(norm))
        np.testing.assert_allclose(summed, p, rtol=1e-6)
        expected = out / np.sqrt(np.mean(np.float64(out) ** 2, axis=-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)  # red when sources are weighed before the update

    def test_a_strong_query_selects_one_source(self):
        blocks, prefix, update, query, scale = self.make(3)
        got, summed = self.run(blocks, prefix, update, 1e4 * query, scale)
        values = np.stack([*blocks, summed])
        scores = values @ query / np.sqrt(np.mean(values**2, axis=-1) + 1e-5)
        chosen = np.take_along_axis(values, scores.argmax(axis=0)[None, :, None], axis=0)[0]
        expected = chosen / np.sqrt(np.mean(chosen**2, axis=-1, keepdims=True) + 1e-5) * scale
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)  # red (NaN) when the softmax is not shifted

    def test_a_token_does_not_see_another(self):
        given = self.make(4)
        clean = self.run(*given)
        for array in (*given[0], *given[1:3]):
            array[2] = np.nan
        for poisoned, sound in zip(self.run(*given), clean, strict=True):
            np.testing.assert_array_equal(np.delete(poisoned, 2, axis=0), np.delete(sound, 2, axis=0))
            assert np.isnan(poisoned[2]).all()

    def test_bfloat16_is_rounded_as_it_is_kept(self):
        blocks, prefix, update, query, scale = self.make(5, shape=(50,))
        rounded = lambda x: jnp.asarray(x, jnp.bfloat16)  # noqa: E731
        given = [rounded(block) for block in blocks], rounded(prefix), rounded(update), query, rounded(scale)
        got, summed = self.run(*given)
        np.testing.assert_array_equal(summed, given[1] + given[2])
        # mix, norm and weight are each rounded once (text-model section 2.1); XLA may keep more digits between two roundings
        mixed = rounded(oracle([np.asarray(b, np.float32) for b in given[0]], summed, query, 1e-5))
        wide = np.float64(mixed)
        normal = rounded(wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5))
        assert np.mean(got == np.asarray(normal * given[4])) > 0.75  # red (under 0.5) when weights or sums are bfloat16


class TestReference(SiteContract):
    impl = "reference"


class TestInterpret(SiteContract):
    impl = "interpret"


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"attn_res\.mix_norm has no implementation 'fast'; built: .*reference"):
        api.mix_norm([], jnp.ones(2), None, jnp.ones(2), jnp.ones(2), 1e-5, jnp.ones(2), 1e-5, impl="fast")
