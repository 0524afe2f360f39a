"""The kernels of the sparse indexer, interpreted: the same contract as the reference, and every edge of their tiles."""

from functools import cache, partial
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.cache import write_keys
from kimi_jax.ops.indexer import api, pallas_scores, pallas_top_k, reference
from kimi_jax.ops.indexer.keys import IndexCache, decode
from kimi_jax.ops.norm import layer_norm
from tests.ops.indexer_contract import FORMS, ScoresContract, SelectContract, TopKContract, held
from tests.ops.mla_contract import jitted


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Several shares of several tiles, and three rounds of blocks, in a few hundred keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_scores, "KEYS", 32)
        patch.setattr(pallas_scores, "PROGRAMS", 6)
        patch.setattr(pallas_top_k, "SMALLEST", 64)
        yield


@cache
def top_k(k):
    return jitted(partial(api.top_k, k=k, impl="interpret"), "interpret")


class TestTopK(TopKContract):
    impl = "interpret"

    def top_k(self, scores, k):
        """With more queries and candidates that are hidden: one program for most cases."""
        flat = scores.reshape(-1, scores.shape[-1])
        more = [(0, -size % step) for size, step in zip(flat.shape, (12, 64), strict=True)]
        found = np.asarray(top_k(k)(np.pad(flat, more, constant_values=-np.inf)))
        assert found.dtype == np.int32 and (found[len(flat) :] == -1).all()
        return found[: len(flat)].reshape(*scores.shape[:-1], k)

    def test_no_queries_or_no_candidates(self):
        # red when a launch without programs is tried
        assert api.top_k(jnp.zeros((2, 0, 9)), 4, impl="interpret").shape == (2, 0, 4)
        assert (api.top_k(jnp.zeros((3, 0)), 4, impl="interpret") == -1).all()


LENGTH, WANTED = 700, 8
"""Candidates of the sweeps: eleven blocks of 64, of which two remain, then one; and how many are chosen."""

ROUNDED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-37, -np.inf, np.inf, 3.0])
EDGES = st.sampled_from([0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 512, 513, 576, 699, 700])


@cache
def visible_top_k():
    return jitted(partial(pallas_top_k.top_k, k=WANTED, interpret=True), "interpret")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    ends=st.lists(EDGES, min_size=3, max_size=3), values=st.lists(ROUNDED, min_size=1, max_size=5), data=st.data()
)
def test_every_edge_of_a_block_and_every_kind_of_tie(ends, values, data):
    # red when a round loses a tie, counts what lies behind the last candidate, or a block leaves too few or too many
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    scores = random.choice(np.array(values, np.float32), (3, LENGTH))
    if data.draw(st.booleans()):
        scores[1] = random.normal(size=LENGTH)  # all different
    seen = np.where(np.arange(LENGTH) < np.array(ends)[:, None], scores, -np.inf)
    behind = np.where(np.isneginf(seen), np.float32(np.nan), seen)
    hidden = np.where(np.arange(LENGTH) < np.array(ends)[:, None], scores, behind)
    found = visible_top_k()(hidden, np.array(ends, np.int32) - 1)
    np.testing.assert_array_equal(found, reference.top_k(jnp.asarray(seen), WANTED))


def test_too_many_wanted_is_refused():
    # red when a block keeps all it has for ever
    with pytest.raises(ValueError, match="top_k of 8193: a kernel keeps at most 8192; nearest that works: 8192"):
        api.top_k(jnp.zeros((1, 9000)), 8193, impl="interpret")


def test_eight_bits_between_two_and_four_billion_elements_are_refused():
    # red when offsets of a kernel would turn negative without a word
    index = IndexCache(jax.ShapeDtypeStruct((24, 1 << 20, 128), jnp.float8_e4m3fn), ())
    q, w, positions = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((24, 1, 32, 128), jnp.bfloat16), ((24, 1, 32), jnp.float32), ((24, 1), jnp.int32))
    )
    with pytest.raises(
        ValueError, match=r"an index cache of \d+ one-byte elements.*nearest that works: 16 or 33 of 24"
    ):
        jax.eval_shape(partial(api.scores, impl="pallas"), q, w, index, positions)


def slow(*values):
    """Cases that add little to those beside them, and a program each."""
    return pytest.param(*values, marks=pytest.mark.slow)


class TestScores(ScoresContract):
    impl = "interpret"

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("page", [slow(None), 32])
    def test_every_format_in_rows_and_pages(self, form, page):
        super().test_every_format_in_rows_and_pages(form, page)

    @pytest.mark.parametrize("length", [slow(1), 31, slow(128), 129, slow(300)])
    def test_lengths_around_a_block(self, length):
        super().test_lengths_around_a_block(length)


class TestSelect(SelectContract):
    impl = "interpret"

    @pytest.mark.parametrize("budget", [slow(1 << 28), 4 * 2 * 300 * 3, slow(1)])
    def test_a_ranking_many_times_longer_than_the_choice(self, budget):
        super().test_a_ranking_many_times_longer_than_the_choice(budget)


def test_a_million_keys_are_scored_and_chosen_in_four_launches():
    # red with blocks of half the size, or when a position or a key is made outside of a kernel
    index = IndexCache(
        *(jax.ShapeDtypeStruct((1, 1 << 20, *rest), dtype) for rest, dtype in (((128,), FP8), ((), FLOAT32)))
    )
    q, w = (jax.ShapeDtypeStruct((1, 1, 32, *rest), dtype) for rest, dtype in (((128,), jnp.bfloat16), ((), FLOAT32)))
    positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    program = jax.make_jaxpr(partial(api.select, k=2048, impl="pallas"))(q, w, index, positions)
    assert launches(program.jaxpr) == 4


FP8, FLOAT32 = jnp.float8_e4m3fn, jnp.float32


def launches(jaxpr) -> int:
    """Kernels that a program starts."""
    inner = [launches(below) for equation in jaxpr.eqns for below in called(equation)]
    return sum(equation.primitive.name == "pallas_call" for equation in jaxpr.eqns) + sum(inner)


def called(equation):
    if equation.primitive.name == "pallas_call":
        return []
    values = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    return [value for value in values if hasattr(value, "eqns")]


@pytest.mark.parametrize(
    ("form", "normed"),
    [
        ("float32", True),
        slow("bfloat16", True),
        ("fp8", True),
        ("mxfp4", True),
        slow("float32", False),
        ("fp8", False),
        ("mxfp4", False),
    ],
)
def test_keys_are_written_as_the_reference_writes_them(form, normed):
    # red when a scale goes to another key, a code to the other half of its byte, a limit is rounded down, or a key that is not
    # new is written; pages whose rows are not a power of two, three sequences that end, begin and do not take part
    random = np.random.default_rng(0)
    width, rows, tokens, page, table = 32 if form == "mxfp4" else 40, 3, 2, 6, np.array([[4, 1], [0, 3], [2, 5]])
    keys = (random.normal(size=(rows, tokens, width)) * 2.0 ** random.integers(-9, 9, (rows, tokens, 1))).astype(
        np.float32
    )
    keys[0, 0, :4], keys[1, 0] = [448, 6, 0.75, -0.25], 0
    index = jax.tree.map(jnp.asarray, held(random.normal(size=(6, page, width)).astype(np.float32), form))
    weight, bias = random.normal(size=(2, width)).astype(np.float32)
    norm = Normed(jnp.asarray(weight), jnp.asarray(bias), 1e-5) if normed else None

    def write(impl):
        run = partial(write_keys, norm=norm, dtype=jnp.float32, pages=jnp.asarray(table), impl=impl)
        return jitted(run, impl)(index, jnp.asarray(keys), jnp.array([11, 0, 5]), jnp.array([2, 2, 0]))

    found, expected = write("interpret"), write("reference")
    if not normed:
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    # a code may flip where the norm's sums are added in another order
    step = {"float32": 1e-6, "bfloat16": 2**-8, "fp8": 2**-3, "mxfp4": 0.5}[form]
    found, expected = (np.asarray(decode(each)) for each in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=step * np.abs(expected).max())
    assert (np.abs(found - expected) > 1e-6 * np.abs(expected).max()).mean() < 0.01


class Normed(NamedTuple):
    weight: jax.Array
    bias: jax.Array
    eps: float

    def __call__(self, x):
        return layer_norm(x, self.weight, self.bias, self.eps)
