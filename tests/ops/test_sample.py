"""Sampling, with the vocabulary whole on one device and split over eight: every rule is tested on both."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.sample import api, noise, threshold
from kimi_jax.ops.sample.api import Choice, Sampling
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh

F32 = np.dtype(np.float32)


@cache
def sampler(devices: int, random: bool, impl: str):
    """``(logits, allowed, sampling, positions) -> Choice`` compiled for one device or for the tp8 layout."""
    if devices == 1:
        return jax.jit(partial(api.sample, parallel=Parallel.single(), random=random, impl=impl))
    layout = load_layout("tp8")
    row, vocab, grid = (
        layout.spec(ArraySpec((8,) * len(axes), F32, axes)) for axes in ((None,), ("vocab",), (None, "vocab"))
    )
    run = partial(api.sample, parallel=Parallel.of(layout), random=random, impl=impl)
    specs = (grid, vocab, Sampling(row, row, row, row), row)
    return jax.jit(jax.shard_map(run, mesh=make_mesh(layout), in_specs=specs, out_specs=row, check_vma=False))


@cache
def keeper(devices: int):
    if devices == 1:
        return jax.jit(partial(threshold.keep, parallel=Parallel.single()))
    layout = load_layout("tp8")
    row, grid = (layout.spec(ArraySpec((8,) * len(axes), F32, axes)) for axes in ((None,), (None, "vocab")))
    run = partial(threshold.keep, parallel=Parallel.of(layout))
    return jax.jit(
        jax.shard_map(run, mesh=make_mesh(layout), in_specs=(grid, row, row), out_specs=grid, check_vma=False)
    )


def draw(
    devices,
    logits,
    *,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    position=0,
    allowed=None,
    random=True,
    impl="reference",
) -> Choice:
    """One choice per row; a few rows are filled up to eight, so that most tests share one compiled program."""
    logits = np.asarray(logits, np.float32)
    wanted, rows = len(logits), max(8, len(logits))

    def column(value, dtype):
        value = np.broadcast_to(np.asarray(value, dtype), wanted)
        return np.concatenate([value, np.zeros(rows - wanted, dtype)])

    columns = (
        column(temperature, np.float32),
        column(top_p, np.float32),
        column(top_k, np.int32),
        column(seed, np.uint32),
    )
    allowed = np.ones(logits.shape[1], bool) if allowed is None else allowed
    logits = np.concatenate([logits, np.zeros((rows - wanted, logits.shape[1]), np.float32)])
    choice = sampler(devices, random, impl)(logits, allowed, Sampling(*columns), column(position, np.int32))
    return Choice(*(np.asarray(array)[:wanted] for array in choice))


def softmax(logits):
    weights = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def kept(scores, top_k, top_p):
    """Top-k and then top-p of one row by sorting, in float64; and how close the cut by mass was."""
    scores = np.float64(scores)
    result = scores > -np.inf
    if top_k > 0:
        result &= scores >= np.sort(scores)[::-1][min(top_k, len(scores)) - 1]
    mass = np.where(result, np.exp(scores - scores.max()), 0)
    if top_p >= 1:
        return result, 1.0
    sums = {value: mass[scores >= value].sum() for value in scores[result]}
    cut = max(value for value, total in sums.items() if total >= top_p * mass.sum())
    return result & (scores >= cut), min(abs(total / mass.sum() - top_p) for total in sums.values())


def chi_square(ids, expected):
    """Distance of the drawn counts from the expected ones over its 1e-6 quantile: above 1 is no accident."""
    counts = np.bincount(ids, minlength=len(expected))
    if counts[expected == 0].any():
        return np.inf
    used = expected > 0
    wanted = len(ids) * expected[used]
    assert wanted.min() > 5 or used.sum() == 1
    freedom = max(1, used.sum() - 1)
    normal = 4.75  # the 1e-6 quantile, Wilson-Hilferty
    limit = freedom * (1 - 2 / (9 * freedom) + normal * np.sqrt(2 / (9 * freedom))) ** 3
    return ((counts[used] - wanted) ** 2 / wanted).sum() / limit


LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -2.0, 0.0, 1.0, -0.5, 2.0, 0.3, -1.8, 1.2, 0.7, -1.5, 0.1, -2.5], np.float32)
DRAWS = 20_000


def many(**options):
    """Draws from LOGITS at successive positions."""
    options = {"position": np.arange(DRAWS), "seed": 5, **options}
    return draw(1, np.broadcast_to(LOGITS, (DRAWS, 16)), **options).ids


class TestDistribution:
    @pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
    def test_draws_follow_the_softmax(self, temperature):
        assert chi_square(many(temperature=temperature), softmax(LOGITS / temperature)) < 1

    def test_draws_over_seeds_follow_the_softmax(self):
        assert chi_square(many(temperature=1, seed=np.arange(DRAWS), position=3), softmax(LOGITS)) < 1

    def test_the_same_test_rejects_biased_rules(self):
        assert chi_square(many(temperature=1), softmax(LOGITS * 1.1)) > 1  # a temperature off by a tenth
        uniform = np.random.default_rng(0).random((DRAWS, 16))
        biased = (softmax(LOGITS) * uniform).argmax(axis=1)  # no logarithm of the noise
        assert chi_square(biased, softmax(LOGITS)) > 1

    @pytest.mark.parametrize(
        ("top_k", "top_p", "temperature"), [(5, 1, 1), (0, 0.7, 1), (6, 0.7, 2), (1, 1, 1), (0, 1e-6, 1)]
    )
    def test_draws_follow_what_is_kept(self, top_k, top_p, temperature):
        possible, margin = kept(LOGITS / np.float32(temperature), top_k, top_p)
        assert margin > 1e-4
        expected = np.where(possible, softmax(LOGITS / temperature), 0)
        ids = many(temperature=temperature, top_k=top_k, top_p=top_p)
        assert chi_square(ids, expected / expected.sum()) < 1  # red when top-p is taken of the mass before top-k

    def test_ids_that_are_not_allowed_leave_their_share_to_the_others(self):
        allowed = np.ones(16, bool)
        allowed[[0, 8, 3]] = False
        expected = np.where(allowed, softmax(LOGITS), 0)
        assert chi_square(many(temperature=1, allowed=allowed), expected / expected.sum()) < 1

    def test_successive_draws_are_independent(self):
        single = np.array([0.5, 0.2, 0.2, 0.1] + [0] * 12)
        with np.errstate(divide="ignore"):
            logits = np.maximum(np.log(single), -100)
        ids = draw(1, np.broadcast_to(logits, (DRAWS, 16)), temperature=1, position=np.arange(DRAWS), seed=9).ids
        assert chi_square(ids[0::2] * 16 + ids[1::2], np.outer(single, single).ravel()) < 1


class GreedyContract:
    """What a greedy draw must do, whatever the number of devices. Subclasses set `devices` and how it runs."""

    devices: int
    impl = "reference"
    random = False

    def draw(self, *args, **options) -> Choice:
        return draw(self.devices, *args, **{"random": self.random, "impl": self.impl, **options})

    def test_greedy(self):
        logits = np.random.default_rng(0).normal(size=(8, 40))
        np.testing.assert_array_equal(self.draw(logits).ids, logits.argmax(axis=1))

    def test_ties_go_to_the_lower_id(self):  # PF-20; inside one device's share and between two
        logits = np.full((3, 40), -1.0)  # five ids a device
        logits[0, [23, 24]] = logits[1, [4, 39]] = 7
        assert self.draw(logits).ids.tolist() == [23, 4, 0]

    def test_only_allowed_ids(self):
        logits = np.random.default_rng(7).normal(size=(8, 40))
        choice = self.draw(logits, allowed=np.arange(40) == 33)
        assert (choice.ids == 33).all()  # seven of eight shares hold no allowed id
        np.testing.assert_array_equal(choice.logprobs, 0)

    def test_logprobs_of_any_size_of_logits(self):
        logits = np.random.default_rng(4).normal(size=(8, 40)) * np.array([[1], [5], [0.1], [30], [1], [1], [1], [1]])
        logits[4] += 1e4  # red (infinite) when the largest logit is not taken off first
        logits[5] -= 1e4
        choice = self.draw(logits)
        expected = np.log(softmax(np.float32(logits)))[np.arange(8), choice.ids]
        np.testing.assert_allclose(choice.logprobs, expected, rtol=1e-5, atol=2e-6)

    def test_rows_that_are_not_finite_are_named_and_change_no_other(self):  # PF-55
        logits = np.random.default_rng(5).normal(size=(8, 40))
        options = {"temperature": 1.0, "top_p": 0.9, "position": np.arange(8)}
        clean = self.draw(logits, **options)
        assert clean.finite.all()
        logits[1, 39], logits[3, 0], logits[5, 20], logits[6] = np.nan, np.inf, -np.inf, np.nan
        choice = self.draw(logits, **options)
        broken = [1, 3, 5, 6]
        assert choice.finite.tolist() == [row not in broken for row in range(8)]  # red when one device's share is asked
        assert ((choice.ids >= 0) & (choice.ids < 40)).all()
        for one, other in zip(choice[:2], clean[:2], strict=True):
            np.testing.assert_array_equal(np.delete(one, broken), np.delete(other, broken))


class SampleContract(GreedyContract):
    """What the program that may draw with a temperature must do besides."""

    random = True

    def test_temperatures_near_zero_are_greedy(self):  # PF-68
        logits = np.random.default_rng(1).normal(size=(8, 40)) * 1e4
        for temperature in (0, 1e-9, 1e-6, 9.9e-6):
            choice = self.draw(logits, temperature=temperature, top_p=0.5, top_k=3)
            np.testing.assert_array_equal(choice.ids, logits.argmax(axis=1))  # red (NaN) when logits are divided by it
            assert np.isfinite(choice.logprobs).all()

    def test_greedy_and_warm_rows_in_one_batch(self):
        logits = np.random.default_rng(2).normal(size=(8, 40)) * 0.1
        ids = self.draw(logits, temperature=[0, 50] * 4).ids
        np.testing.assert_array_equal(ids[::2], logits[::2].argmax(axis=1))
        assert (ids[1::2] != logits[1::2].argmax(axis=1)).any()

    def test_a_draw_depends_on_seed_and_position_alone(self):
        logits = np.random.default_rng(3).normal(size=(1, 40))
        one = self.draw(
            np.repeat(logits, 8, 0), temperature=5, seed=[1, 1, 2, 2, 1, 1, 3, 4], position=[0, 1, 0, 1, 0, 1, 0, 0]
        )
        assert one.ids[:2].tolist() == one.ids[4:6].tolist()
        drawn = [self.draw(logits, temperature=5, seed=s, position=0).ids[0] for s in (1, 2, 3, 4)]
        assert drawn == one.ids[[0, 2, 6, 7]].tolist()  # red when the row number is part of the key
        assert len(set(one.ids.tolist())) > 3
        spread = self.draw(np.zeros((8, 40)), temperature=1, seed=0, position=np.arange(8)).ids
        assert len(set(spread.tolist())) > 4  # red when the position is left out

    def test_ids_that_are_not_allowed_are_never_drawn(self):
        logits = np.random.default_rng(7).normal(size=(8, 40))
        allowed = np.arange(40) == 33
        for options in ({"temperature": 0}, {"temperature": 100, "top_p": 0.01, "top_k": 1}):
            choice = self.draw(logits, allowed=allowed, **options)
            assert (choice.ids == 33).all()  # seven of eight shares hold no allowed id
            np.testing.assert_array_equal(choice.logprobs, 0)

    def test_a_padded_vocabulary(self):  # PF-26
        logits = np.full((8, 40), -5.0)
        logits[:, 10:] = 0
        choice = self.draw(logits, allowed=np.arange(40) < 10, temperature=1, position=np.arange(8))
        assert (choice.ids < 10).all()
        np.testing.assert_allclose(choice.logprobs, -np.log(10), rtol=1e-6)  # red when the sum is over padding too

    def test_logprobs_are_those_of_the_uncut_softmax(self):
        logits = np.random.default_rng(4).normal(size=(8, 40)) * np.array([[1], [5], [0.1], [30], [1], [1], [1], [1]])
        logits[4] += 1e4  # red (infinite) when the largest logit is not taken off first
        logits[5] -= 1e4
        choice = self.draw(logits, temperature=[0, 1, 2, 0.5] * 2, top_k=[0, 3] * 4, top_p=0.9)
        expected = np.log(softmax(np.float32(logits)))[np.arange(8), choice.ids]
        np.testing.assert_allclose(choice.logprobs, expected, rtol=1e-5, atol=2e-6)

    def test_neighbouring_floats_are_told_apart(self):
        scores = np.full((4, 8), 1.0, np.float32)
        scores[:, 5] = np.nextafter(np.float32(1), np.float32(2))
        got = keeper(self.devices)(scores, np.array([1, 0, 2, 8], np.int32), np.array([1, 1e-6, 1, 1], np.float32))
        # red when the last byte of the cut is left out; the row of top-k 2 keeps all that tie for the second place
        assert np.asarray(got).sum(axis=1).tolist() == [1, 1, 8, 8]

    @settings(max_examples=100, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(st.data())
    def test_what_is_kept_is_exact(self, data):
        numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.5, -np.inf]) | st.floats(
            -2, 2, width=16, allow_subnormal=False
        )
        numbers |= st.floats(-60, 60, width=32, allow_subnormal=False)
        rows = data.draw(st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=4, max_size=4))
        scores = np.array(rows, np.float32)
        assume((scores > -np.inf).any(axis=1).all())
        top_k = np.array(data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=4)), np.int32)
        fractions = st.sampled_from([1.0, 1e-6]) | st.floats(0.001, 0.999)
        top_p = np.array(data.draw(st.lists(fractions, min_size=4, max_size=4)), np.float32)
        got = np.asarray(keeper(self.devices)(scores, top_k, top_p))
        for row in range(4):
            expected, margin = kept(scores[row], top_k[row], np.float64(top_p[row]))
            if margin > 1e-5:  # nearer, float32 sums may fall on either side
                np.testing.assert_array_equal(got[row], expected)


class TestOneDevice(SampleContract):
    devices = 1


class TestEightDevices(SampleContract):
    devices = 8


class TestGreedyOnOneDevice(GreedyContract):
    devices = 1


class TestGreedyOnEightDevices(GreedyContract):
    devices = 8


class KernelContract(GreedyContract):
    """What the kernels must do besides."""

    impl = "interpret"

    def test_a_share_longer_than_a_pass(self):
        logits = np.random.default_rng(8).normal(size=(8, 5000 * 8)).astype(np.float32)
        logits[0, 4999] = logits[1, 39999] = logits[2, [100, 4196]] = 9  # red when the end of a share is left out
        choice = self.draw(logits)
        np.testing.assert_array_equal(choice.ids, logits.argmax(axis=1))  # red when a tie goes to the later pass
        np.testing.assert_allclose(choice.logprobs, np.log(softmax(logits).max(axis=1)), rtol=2e-5)


class TestKernelOnOneDevice(KernelContract):
    devices = 1


class TestKernelOnEightDevices(KernelContract):
    devices = 8


def test_the_devices_do_not_change_a_draw():
    random = np.random.default_rng(6)
    logits = random.normal(size=(64, 200)) * 3
    options = {
        "temperature": random.choice([0, 0.3, 1, 5], 64),
        "top_p": random.choice([1, 0.9, 0.5, 0.05], 64),
        "top_k": random.choice([0, 1, 7, 150], 64),
        "seed": random.integers(0, 1 << 32, 64),
        "position": random.integers(0, 1 << 20, 64),
    }
    one, eight = (draw(devices, logits, **options) for devices in (1, 8))
    np.testing.assert_array_equal(one.ids, eight.ids)  # red when noise is a function of the place in a share
    np.testing.assert_allclose(one.logprobs, eight.logprobs, rtol=1e-5, atol=1e-6)


class TestNoise:
    def test_it_is_finite_for_the_largest_random_words(self):
        # words of 24 leading ones: a uniform number rounded to 1 would make infinite noise, so that one id in 2^24
        # wins over every probability. At a vocabulary of 163,840 that is one token in a hundred.
        places = [(7, 17, 802717), (7, 34, 442888), (7, 51, 569709)]
        seeds, positions, ids = (np.array(column) for column in zip(*places, strict=True))
        for seed, position, number in zip(seeds, positions, ids, strict=True):
            found = noise.gumbel(jnp.array([seed], jnp.uint32), jnp.array([position]), int(number), 1)
            assert np.isfinite(found).all()

    def test_its_distribution_up_to_the_tail(self):
        values = np.asarray(noise.gumbel(jnp.array([3, 4], jnp.uint32), jnp.array([0, 9]), 0, 1 << 20)).ravel()
        assert np.isfinite(values).all()
        for level in (-2, -1, 0, 1, 3, 6, 9, 11):
            expected = values.size * -np.expm1(-np.exp(-level))
            assert abs((values > level).sum() - expected) < 5 * np.sqrt(expected)

    def test_an_id_has_the_same_noise_in_every_share(self):
        whole = noise.gumbel(jnp.array([5], jnp.uint32), jnp.array([7]), 0, 40)
        share = noise.gumbel(jnp.array([5], jnp.uint32), jnp.array([7]), 24, 8)
        np.testing.assert_array_equal(share, whole[:, 24:32])


def test_integers_sort_as_their_floats():
    values = np.array([-np.inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, 3e38, np.inf], np.float32)
    keys = np.asarray(jax.jit(threshold.sortable)(values)).astype(np.int64)
    assert ((np.diff(keys) > 0) == (np.diff(values) > 0)).all()  # red with `values + 0.0`, which XLA leaves out
