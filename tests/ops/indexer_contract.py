"""What every implementation of the sparse indexer must do, against float64 and the golden cases of k31-tiny."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.indexer import api
from kimi_jax.ops.indexer.keys import IndexCache, decode, encode
from tests.conftest import FIXTURES
from tests.ops.mla_contract import jitted

FORMS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn, "mxfp4": np.uint8}


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "k31-tiny" / "golden.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("topk/", "indexer/"))}


def cases(kind: str) -> list[str]:
    return sorted({name.split("/")[1] for name in golden() if name.startswith(f"{kind}/")})


def case(kind: str, name: str) -> dict[str, np.ndarray]:
    start = f"{kind}/{name}/"
    return {key.removeprefix(start): value for key, value in golden().items() if key.startswith(start)}


def held(keys: np.ndarray, form: str = "float32") -> IndexCache:
    """Keys as a cache in this format holds them, as numpy arrays."""
    like = IndexCache(jnp.zeros((), FORMS[form]))
    return jax.tree.map(np.asarray, jax.jit(lambda keys: encode(keys, like))(jnp.asarray(keys)))


def in_pages(index: IndexCache, page: int, spare: int = 3) -> tuple[IndexCache, np.ndarray]:
    """The same sequences in shuffled pages of a pool; what no sequence uses is not a number where the dtype has one."""
    rows, length = index.keys.shape[:2]
    each = -(-length // page)
    table = np.random.default_rng(0).permutation(rows * each + spare)[: rows * each].reshape(rows, each)

    def pool(array: np.ndarray) -> np.ndarray:
        poison = 255 if array.dtype == np.uint8 else np.nan
        result = np.full((rows * each + spare, page, *array.shape[2:]), poison, np.float32).astype(array.dtype)
        padding = [(0, 0), (0, each * page - length)] + [(0, 0)] * (array.ndim - 2)
        result[table] = np.pad(array, padding).reshape(rows, each, page, *array.shape[2:])
        return result

    return jax.tree.map(pool, index), table.astype(np.int32)


def oracle(q: np.ndarray, w: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    product = np.einsum("bthd,bsd->bths", q.astype(np.float64), keys.astype(np.float64))
    scores = np.einsum("bths,bth->bts", np.maximum(product, 0), w.astype(np.float64))
    return np.where(np.arange(keys.shape[1]) <= positions[..., None], scores, -np.inf)


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """By the rule, one candidate at a time."""
    result = np.full((*scores.shape[:-1], k), -1, np.int32)
    for at in np.ndindex(scores.shape[:-1]):
        seen = [s for s in range(scores.shape[-1]) if scores[at][s] > -np.inf]
        chosen = sorted(sorted(seen, key=lambda s, at=at: (-scores[at][s], s))[:k])
        result[at][: len(chosen)] = chosen
    return result


def question(seed: int, tokens: int, length: int, heads: int = 3, width: int = 32) -> list[np.ndarray]:
    """Queries of two sequences that end at the last key and at the third part of them, one token of padding each."""
    random = np.random.default_rng(seed)
    q, w = random.normal(size=(2, tokens, heads, width)), random.normal(size=(2, tokens, heads))
    keys = random.normal(size=(2, length, width))
    ends = np.array([length, max(length // 3, 1)])
    positions = ends[:, None] - tokens + np.arange(tokens)
    positions[:, 0] = -1
    return [
        q.astype(np.float32),
        w.astype(np.float32),
        keys.astype(np.float32),
        np.maximum(positions, -1).astype(np.int32),
    ]


class TopKContract:
    """What every implementation of top_k must do. Subclasses set `impl`."""

    impl = "reference"

    def top_k(self, scores: np.ndarray, k: int) -> np.ndarray:
        found = jitted(partial(api.top_k, k=k, impl=self.impl), self.impl)(scores)
        assert found.dtype == jnp.int32
        return np.asarray(found)

    @pytest.mark.parametrize("name", cases("topk"))
    def test_golden(self, name):
        # red when a tie goes to the later position, -0.0 is below +0.0, a hidden position is taken or K is off by one
        given = case("topk", name)
        scores, k = given["scores"], int(given["k"])
        hidden = np.arange(scores.shape[1]) >= given["visible"][:, None]
        np.testing.assert_array_equal(self.top_k(np.where(hidden, -np.inf, scores), k), given["selected"])

    @pytest.mark.parametrize("shape, k", [((3, 5), 8), ((2, 3, 700), 16), ((1, 1, 1), 1), ((2, 0, 9), 4)])
    def test_sizes(self, shape, k):
        # red when fewer candidates than k are not filled up with -1, or the leading dimensions are mixed
        scores = np.random.default_rng(0).integers(-4, 4, shape).astype(np.float32)
        scores = np.where(scores == -4, -np.inf, scores)
        np.testing.assert_array_equal(self.top_k(scores, k), best(scores, k))

    def test_nothing_visible(self):
        # red when padding chooses position 0
        assert (self.top_k(np.full((2, 40), -np.inf, np.float32), 8) == -1).all()


class ScoresContract:
    """What every implementation of scores must do. Subclasses set `impl`."""

    impl = "reference"
    tolerance = 1e-4

    def scores(self, q, w, index: IndexCache, positions, pages=None) -> np.ndarray:
        found = jitted(partial(api.scores, impl=self.impl), self.impl)(q, w, index, positions, pages)
        assert found.dtype == jnp.float32
        return np.asarray(found)

    def assert_scores(self, found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
        seen = np.isfinite(expected)
        limit = self.tolerance * max(1.0, np.abs(expected[seen]).max(initial=0))
        np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=limit)

    @pytest.mark.parametrize("name", cases("indexer"))
    def test_golden(self, name):
        # red when the ReLU comes after the sum or the weight, weights lose their sign, or heads are mixed
        given = case("indexer", name)
        tokens = len(given["q"])
        found = self.scores(given["q"][None], given["w"][None], held(given["k"][None]), np.arange(tokens)[None])[0]
        self.assert_scores(found, np.where(np.tri(tokens, dtype=bool), given["scores"], -np.inf))
        if "exact_zeros" in given:
            expected = np.tril(given["scores"] == 0)
            assert expected.any() and (found[expected] == 0).all()  # what decides between clipped keys

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("page", [None, 32])
    def test_every_format_in_rows_and_pages(self, form, page):
        # red when a scale is left out or of another key, codes are in another order, or a page of another sequence is read
        q, w, keys, positions = question(1, 3, 160)
        index, pages = held(keys, form), None
        plain = np.asarray(decode(jax.tree.map(jnp.asarray, index)))
        if page:
            index, pages = in_pages(index, page)
        self.assert_scores(self.scores(q, w, index, positions, pages), oracle(q, w, plain, positions))

    @pytest.mark.parametrize("length", [1, 31, 128, 129, 300])
    def test_lengths_around_a_block(self, length):
        # red when the last block is left out, or shifted over the one before
        q, w, keys, positions = question(2, 2, length)
        self.assert_scores(self.scores(q, w, held(keys), positions), oracle(q, w, keys, positions))

    def test_what_is_not_visible_may_be_anything(self):
        # red when a key past the position reaches a score: not a number times zero
        q, w, keys, positions = question(3, 2, 200)
        clean = self.scores(q, w, held(keys), positions)
        keys[1, positions[1].max() + 1 :] = np.nan
        np.testing.assert_array_equal(self.scores(q, w, held(keys), positions), clean)


class SelectContract:
    """What every implementation of select must do. Subclasses set `impl`."""

    impl = "reference"

    @pytest.mark.parametrize("budget", [1 << 28, 4 * 2 * 300 * 3, 1])
    def test_a_ranking_many_times_longer_than_the_choice(self, budget):
        # red when a chunk of queries meets the positions of another, or is filled up with real ones (PF-44)
        q, w, keys, positions = question(4, 7, 300)
        run = jitted(partial(api.select, k=16, impl=self.impl, budget=budget), self.impl)
        found = run(q, w, held(keys), positions)
        np.testing.assert_array_equal(found, best(oracle(q, w, keys, positions), 16))
        assert (np.asarray(found)[:, 0] == -1).all()  # padding
        assert (np.asarray(found) <= positions[..., None]).all()  # a row of several never sees the one after it
