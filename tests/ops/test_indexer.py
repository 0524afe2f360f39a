import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.indexer import api
from kimi_jax.ops.indexer.keys import IndexCache, decode, power, scale_exponent
from tests.ops.indexer_contract import FORMS, ScoresContract, SelectContract, TopKContract, held


class TestTopK(TopKContract):
    pass


class TestScores(ScoresContract):
    pass


class TestSelect(SelectContract):
    pass


def test_unknown_implementation_is_refused():
    # red when an unknown name runs something else
    with pytest.raises(ValueError, match=r"indexer\.top_k has no implementation 'fast'; built: .*reference"):
        api.top_k(jnp.zeros((1, 4)), 2, impl="fast")


def test_scores_of_single_heads_never_exist_for_all_keys():
    # red when the heads are summed after all keys are scored: 32 times the result
    def temp(length: int) -> int:
        index = IndexCache(jax.ShapeDtypeStruct((1, length, 16), jnp.float32))
        q, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 4, 32, 16), (1, 4, 32)))
        positions = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        return jax.jit(api.scores).lower(q, w, index, positions).compile().memory_analysis().temp_size_in_bytes

    assert temp(1 << 17) - temp(1 << 14) < 3 * 4 * 4 * (1 << 17)


class TestKeys:
    @pytest.mark.parametrize("form, error", [("float32", 0), ("bfloat16", 2**-8), ("fp8", 2**-3), ("mxfp4", 0.5)])
    def test_a_key_keeps_its_size(self, form, error):
        # red when a scale is rounded down, which saturates the largest channel
        keys = np.random.default_rng(0).normal(size=(40, 128)).astype(np.float32) * 2.0 ** np.arange(-20, 20)[:, None]
        found = np.asarray(decode(jax.tree.map(jnp.asarray, held(keys, form))))
        largest = np.abs(keys).max(axis=-1)
        assert (np.abs(found - keys).max(axis=-1) <= error * largest).all()

    def test_scales_are_powers_of_two_that_nothing_exceeds(self):
        # red when the exponent is off by one at 448 times a power of two
        largest = np.array([448, 448.1, 447.9, 224, 1e-3, 3e38, 0], np.float32)
        scale = np.asarray(power(scale_exponent(jnp.asarray(largest))))
        np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
        assert (largest[:-1] / scale[:-1] <= 448).all() and (largest[:-1] / scale[:-1] > 224).all()
        assert scale[-1] == 1

    @pytest.mark.parametrize("form", FORMS)
    def test_zeros_stay_zeros(self, form):
        # red when the scale of an empty key is not a number
        assert not np.asarray(decode(jax.tree.map(jnp.asarray, held(np.zeros((2, 40)), form)))).any()

    @pytest.mark.parametrize("form, least", [("fp8", 0.97), ("mxfp4", 0.9)])
    def test_narrow_keys_find_most_of_the_best(self, form, least):
        # red when a format loses more than it must; measured 0.973 and 0.911
        random = np.random.default_rng(5)
        q, w = random.normal(size=(1, 8, 8, 128)), random.normal(size=(1, 8, 8))
        keys, positions = random.normal(size=(1, 2000, 128)), np.full((1, 8), 1999, np.int32)
        exact, narrow = (
            np.asarray(api.select(q, w, held(keys, name), positions, k=200))[0] for name in ("float32", form)
        )
        recall = np.mean([len(set(a) & set(b)) / 200 for a, b in zip(exact, narrow, strict=True)])
        assert recall >= least, recall
