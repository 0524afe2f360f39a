"""What every implementation of latent attention must do, against a float64 oracle."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.mla import api

HEADS, NOPE, SHARED, VALUE, LATENT = 3, 5, 2, 9, 11
"""All different, so that a swapped axis cannot go unseen."""


class Case(NamedTuple):
    """Inputs of one call, as numpy arrays."""

    query: np.ndarray
    cache: np.ndarray
    expand: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray


def make(seed, lengths, *, tokens=1, length=600, padding=0, scale=1.0):
    """Each row's last real tokens ask; the last ``padding`` queries of every row are padding."""
    random = np.random.default_rng(seed)
    rows = len(lengths)
    query = scale * random.normal(size=(rows, tokens, HEADS, NOPE + SHARED))
    cache = random.normal(size=(rows, length, LATENT + SHARED))
    expand = random.normal(size=(HEADS * (NOPE + VALUE), LATENT)) / np.sqrt(LATENT)
    lengths = np.array(lengths, np.int32)
    offset = np.arange(tokens, dtype=np.int32)
    positions = lengths[:, None] - (tokens - padding) + offset
    positions = np.where((offset < tokens - padding) & (positions >= 0), positions, -1)
    return Case(*(array.astype(np.float32) for array in (query, cache, expand)), positions, lengths)


def oracle(case: Case) -> np.ndarray:
    query, held, expand = (np.asarray(array, np.float64) for array in case[:3])
    per_head = expand.reshape(HEADS, NOPE + VALUE, LATENT)
    out = np.zeros((*query.shape[:3], VALUE))
    for row, token, head in np.ndindex(query.shape[:3]):
        seen = min(case.positions[row, token] + 1, case.lengths[row])
        if seen <= 0:
            continue
        latent, shared = held[row, :seen, :LATENT], held[row, :seen, LATENT:]
        q = query[row, token, head]
        score = latent @ per_head[head, :NOPE].T @ q[:NOPE] + shared @ q[NOPE:]
        score = score / np.sqrt(NOPE + SHARED)
        weight = np.exp(score - score.max())
        out[row, token, head] = weight / weight.sum() @ latent @ per_head[head, NOPE:].T
    return out


@cache
def compiled(form, impl="reference"):
    return jitted(partial(api.attend, nope_dim=NOPE, form=form, impl=impl), impl)


def jitted(run, impl):
    """Compiled; interpreted kernels without optimisation, which takes longer than they run."""
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0} if impl == "interpret" else None)


def in_pages(case: Case, page: int, seed: int = 0, spare: int = 3) -> tuple[Case, np.ndarray]:
    """The same sequences with their rows in shuffled pages of a pool; what no sequence uses is not a number."""
    rows, length, width = case.cache.shape
    each = -(-length // page)
    table = np.random.default_rng(seed).permutation(rows * each + spare)[: rows * each].reshape(rows, each)
    pool = np.full((rows * each + spare, page, width), np.nan, case.cache.dtype)
    padded = np.pad(case.cache.astype(np.float32), ((0, 0), (0, each * page - length), (0, 0)), constant_values=np.nan)
    pool[table] = padded.reshape(rows, each, page, width)
    return case._replace(cache=pool), table.astype(np.int32)


EDGES = [1, 2, 255, 256, 257, 511, 512, 513, 599, 600]
"""Lengths around the reference's blocks of 256 rows, in a cache of 600."""


class Attending:
    """An implementation under test. Subclasses set `form` and `impl`."""

    form = ""
    impl = "reference"
    tolerance = 3e-6
    bfloat16_runs = True

    @property
    def attend(self):
        return compiled(self.form, self.impl)

    def run(self, case: Case) -> np.ndarray:
        out = self.attend(*map(jnp.asarray, case))
        assert out.dtype == jnp.float32 and out.shape == (*case.query.shape[:3], VALUE)
        return np.asarray(out)

    def assert_right(self, case: Case, tolerance: float | None = None) -> None:
        expected = oracle(case)
        limit = (tolerance or self.tolerance) * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(self.run(case), expected, rtol=0, atol=limit)


class AttendContract(Attending):
    """What every implementation of attend must do."""

    @pytest.mark.parametrize("length", EDGES)
    def test_one_query_per_row(self, length):
        # red when the last block is read twice, a block is left out, or the scale is that of the key's own part
        self.assert_right(make(length, [length, 300]))

    @pytest.mark.parametrize("length", EDGES)
    def test_several_queries_are_causal(self, length):
        self.assert_right(make(length, [length, 301], tokens=4, padding=0 if length > 3 else 4 - length))

    def test_padding_gives_zeros_whatever_it_holds(self):
        case = make(1, [300, 2], tokens=4, padding=2)
        clean = self.run(case)
        case.query[:, 2:] = np.nan
        poisoned = self.run(case)
        assert not poisoned[:, 2:].any()  # red (NaN) when a query that sees nothing divides by its sum
        np.testing.assert_array_equal(poisoned, clean)

    @pytest.mark.parametrize("poison", [np.nan, 1e4, np.inf])
    @pytest.mark.parametrize("length", [1, 256, 300, 599])
    def test_rows_that_are_not_written_are_not_read(self, poison, length):  # PF-03
        case = make(2, [length, 400], tokens=4, padding=0 if length > 3 else 3)
        clean = self.run(case)
        case.cache[0, length:], case.cache[1, 400:] = poison, poison
        np.testing.assert_array_equal(self.run(case), clean)  # red when values of hidden rows meet a weight of 0

    def test_an_idle_row_gives_zeros_and_disturbs_no_other(self):
        case = make(3, [300, 500])
        clean = self.run(case)
        case.lengths[0], case.positions[0], case.cache[0] = 0, -1, np.nan
        idle = self.run(case)
        assert not idle[0].any()
        np.testing.assert_array_equal(idle[1], clean[1])
        case.lengths[:], case.positions[:] = 0, -1
        assert not self.run(case).any()

    def test_a_row_does_not_depend_on_the_others(self):
        case = make(4, [300, 20])
        short = self.run(case)[1]
        case.lengths[0], case.positions[0] = 600, 599
        np.testing.assert_array_equal(self.run(case)[1], short)  # more blocks run for the other row

    def test_later_rows_are_hidden_from_earlier_queries(self):
        case = make(5, [300, 300], tokens=4)
        clean = self.run(case)
        case.cache[:, 298] += 1  # position of the third query
        got = self.run(case)
        np.testing.assert_array_equal(got[:, :2], clean[:, :2])
        assert (got[:, 2:] != clean[:, 2:]).any()

    @pytest.mark.parametrize("scale", [30.0, 3000.0])
    def test_large_scores(self, scale):
        case = make(6, [600, 513], scale=scale)
        self.assert_right(case, tolerance=3e-6 * scale)  # float32 scores are off by 1e-7 of their size

    @pytest.mark.parametrize("order", [1, -1])
    def test_the_largest_score_may_come_first_or_last(self, order):
        case = make(7, [600, 600])
        case.query[..., :NOPE] = 0
        case.query[..., NOPE:] = 1
        case.cache[..., LATENT:] = np.linspace(-150, 150, 600)[::order, None]  # scores from -113 to 113
        self.assert_right(case)  # red (inf) without the running maximum, or when older sums are not faded
        case.cache[..., LATENT:] -= 300
        self.assert_right(case)  # red (zeros) when the maximum starts at 0: every weight then underflows

    def test_the_weight_of_one_row(self):
        case = make(8, [1, 1])
        got = self.run(case)
        values = case.expand.reshape(HEADS, -1, LATENT)[:, NOPE:]
        expected = np.einsum("bl,hvl->bhv", case.cache[:, 0, :LATENT], values)
        np.testing.assert_allclose(got[:, 0], expected, atol=self.tolerance * 3)

    def test_eight_bits_are_widened_exactly(self):
        case = make(9, [400, 257])
        # oracle and op read the same stored values
        self.assert_right(case._replace(cache=case.cache.astype(ml_dtypes.float8_e4m3fn)))

    def test_bfloat16_operands(self):
        if not self.bfloat16_runs:
            pytest.skip("no such product in XLA for CPU, where operands are float32 (kimi_jax.precision)")
        case = make(10, [400, 257], tokens=4)
        case = case._replace(expand=case.expand.astype(ml_dtypes.bfloat16), cache=case.cache.astype(ml_dtypes.bfloat16))
        error = np.abs(self.run(case) - oracle(case))
        assert error.max() < 0.05 and np.median(error) < 4e-3  # queries, keys and weights are rounded to 8 bits

    def test_both_forms_agree(self):
        case = make(11, [600, 290], tokens=4)
        other = compiled("absorbed" if self.form == "direct" else "direct", self.impl)(*map(jnp.asarray, case))
        np.testing.assert_allclose(self.run(case), other, rtol=0, atol=self.tolerance * 2)

    def test_identical_calls_are_bitwise_identical(self):
        case = make(12, [600, 290], tokens=4)
        np.testing.assert_array_equal(self.run(case), self.run(case))

    def test_the_gate_is_a_sigmoid_in_its_own_dtype(self):
        case = make(14, [600, 290], tokens=4, padding=1)
        gate = np.random.default_rng(1).normal(size=(2, 4, HEADS, VALUE)).astype(ml_dtypes.bfloat16)
        got = self.attend(*map(jnp.asarray, case), gate=jnp.asarray(gate))
        expected = oracle(case) / (1 + np.exp(-gate.astype(np.float64)))
        assert got.dtype == jnp.bfloat16 and not got[:, 3].any()
        # both factors and their product are rounded to 8 bits; red for silu, or a gate of another head
        np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2**-7, atol=1e-4)


class ShapesContract(Attending):
    """Sizes that take a program each."""

    @pytest.mark.parametrize("size", [1, 255, 257, 700])
    def test_any_size_of_cache(self, size):
        for length in {1, size // 2 + 1, size}:
            self.assert_right(make(size, [length, size], length=size))

    def test_prefill_from_nothing(self):
        self.assert_right(make(0, [70, 70], tokens=70, length=80))

    @pytest.mark.parametrize("page", [32, 96])
    def test_pages_in_any_order(self, page):
        case = make(13, [599, 290], tokens=4)
        paged, table = in_pages(case, page)
        got = self.attend(*map(jnp.asarray, paged), pages=jnp.asarray(table))
        limit = self.tolerance * np.abs(oracle(case)).max()
        np.testing.assert_allclose(got, oracle(case), rtol=0, atol=limit)  # red when a tile is read across pages


class PartialContract:
    """What every implementation of attend_partial must do. Subclasses set `impl`."""

    impl = "reference"

    def run(self, query: np.ndarray, case: Case, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Attention over the cached rows first..last, as a device that holds nothing else computes it."""
        held = np.full_like(case.cache, np.nan)
        held[:, : last - first] = case.cache[:, first:last]
        lengths = np.clip(case.lengths - first, 0, last - first)
        value, weight = partial_attention(self.impl)(*map(jnp.asarray, (query, held, case.positions - first, lengths)))
        assert value.dtype == weight.dtype == jnp.float32
        return np.asarray(value, np.float64), np.asarray(weight, np.float64)

    @pytest.mark.parametrize("cuts", [(), (300,), (7, 256, 300), (0, 599), (299,)])
    def test_parts_joined_by_their_weights_are_the_whole(self, cuts):
        case = make(20, [600, 299], tokens=4, padding=1)
        query = absorbing(self.impl)(jnp.asarray(case.query), jnp.asarray(case.expand))
        parts = [self.run(query, case, *pair) for pair in zip((0, *cuts), (*cuts, 600), strict=True)]
        weights = np.stack([weight for _, weight in parts])
        share = np.exp(weights - weights.max(axis=0))
        share = np.where(weights > -1e30, share, 0)
        value = sum(s[..., None] * v for s, (v, _) in zip(share, parts, strict=True))
        value = value / np.maximum(share.sum(axis=0), 1e-30)[..., None]
        got = np.einsum("btnr,nvr->btnv", value, case.expand.reshape(HEADS, -1, LATENT)[:, NOPE:])
        np.testing.assert_allclose(got, oracle(case), rtol=0, atol=5e-6)  # red when a weight is to base 2

    def test_a_part_that_a_query_does_not_see(self):
        case = make(21, [600, 299], tokens=4)
        query = absorbing(self.impl)(jnp.asarray(case.query), jnp.asarray(case.expand))
        value, weight = self.run(query, case, 299, 600)
        assert not value[1].any() and (weight[1] == np.float32(-1e30)).all()  # red (NaN) when divided by a sum of 0
        assert (weight[0] > -1e3).all()


@cache
def partial_attention(impl):
    return jitted(partial(api.attend_partial, latent=LATENT, scale=(NOPE + SHARED) ** -0.5, impl=impl), impl)


@cache
def absorbing(impl):
    return jitted(partial(api.absorb, nope_dim=NOPE, impl=impl), impl)
