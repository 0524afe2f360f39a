"""Draws with every extra, against numpy, with the vocabulary split over eight devices; one device draws the same."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.sample import api, extras, noise
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.ops.sample.extras import Extras, Seen
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

VOCAB, ROWS, TOP = 520, 8, 70
"""A device's share is no whole number of the mask's words, and smaller than the alternatives asked for."""


@cache
def sampler(devices: int, kind: str):
    """``(logits, allowed, sampling, extras, seen, positions)`` compiled for one device or for the tp8 layout."""

    def run(logits, allowed, sampling, given, seen, positions, parallel):
        if kind == "plain":
            return api.sample(logits, allowed, sampling, positions, parallel, random=True)
        return api.sample_full(logits, allowed, sampling, given, seen, positions, parallel, top=TOP)

    if devices == 1:
        return jax.jit(partial(run, parallel=Parallel.single()))
    layout = load_layout("tp8")
    spec = lambda *axes: layout.spec(ArraySpec((8,) * len(axes), np.dtype(np.float32), axes))  # noqa: E731
    row, grid = spec(None), spec(None, "vocab")
    inputs = (grid, spec("vocab"), Sampling(*[row] * 4), Extras(*[row] * 7), Seen(grid, grid), row)
    mapped = partial(run, parallel=Parallel.of(layout))
    return jax.jit(jax.shard_map(mapped, mesh=make_mesh(layout), in_specs=inputs, out_specs=row, check_vma=False))


def case(seed: int = 0, **fields):
    """Arguments of eight rows; fields of Sampling, Extras and Seen by name, neutral where not given."""
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(ROWS, VOCAB)) * 2).astype(np.float32)
    neutral = extras.neutral(ROWS, VOCAB)
    sampling = Sampling(
        np.zeros(ROWS, np.float32),
        np.ones(ROWS, np.float32),
        np.zeros(ROWS, np.int32),
        np.arange(ROWS, dtype=np.uint32),
    )
    seen = Seen(np.zeros((ROWS, VOCAB), bool), np.zeros((ROWS, VOCAB), np.int32))
    parts = []
    for part in (sampling, neutral, seen):
        mine = {name: value for name, value in fields.items() if name in part._fields}
        parts.append(
            part._replace(
                **{
                    name: np.broadcast_to(
                        np.asarray(value, getattr(part, name).dtype), getattr(part, name).shape
                    ).copy()
                    for name, value in mine.items()
                }
            )
        )
    allowed = fields.get("allowed", np.ones(VOCAB, bool))
    return (fields.get("logits", logits), allowed, *parts, np.arange(ROWS, dtype=np.int32) * 11)


gumbels = jax.jit(partial(noise.gumbel, offset=0, width=VOCAB))


def packed(allowed: np.ndarray) -> np.ndarray:
    """Bits of [rows, vocab] as words, the lowest bit first."""
    padded = np.pad(allowed, ((0, 0), (0, -VOCAB % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def biases(*rows: dict[int, float]) -> dict[str, np.ndarray]:
    ids, values = np.full((ROWS, extras.BIAS), -1, np.int32), np.zeros((ROWS, extras.BIAS), np.float32)
    for row, given in enumerate(rows):
        ids[row, : len(given)], values[row, : len(given)] = list(given), list(given.values())
    return {"bias_ids": ids, "bias": values}


def history(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    drawn = random.integers(0, 4, (ROWS, VOCAB)) * (random.random((ROWS, VOCAB)) < 0.3)
    return {"drawn": drawn, "prompt": random.random((ROWS, VOCAB)) < 0.2}


def shaped(logits, allowed, given: Extras, seen: Seen) -> np.ndarray:
    """Logits as they are drawn from, in float64: bias, repetition, frequency and presence, mask."""
    result = np.float64(logits)
    for row, place in zip(*np.nonzero(given.bias_ids >= 0), strict=True):
        result[row, given.bias_ids[row, place]] += given.bias[row, place]
    repetition, frequency, presence = (
        np.float64(field)[:, None] for field in (given.repetition, given.frequency, given.presence)
    )
    repeated = np.where(result > 0, result / repetition, result * repetition)
    result = np.where((seen.drawn > 0) | seen.prompt, repeated, result)
    result -= frequency * seen.drawn + presence * (seen.drawn > 0)
    bits = np.unpackbits(given.mask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return np.where((bits == 1) & allowed, result, -np.inf)


def expected_ids(
    logits, allowed, sampling: Sampling, given: Extras, seen: Seen, positions
) -> tuple[np.ndarray, np.ndarray]:
    """The drawn ids by sorting, and how clear each draw was: the lead of the winner, the nearness of a cut."""
    ids, margins = [], []
    for row, scores in enumerate(shaped(logits, allowed, given, seen)):
        if sampling.temperature[row] == 0:
            order = np.sort(scores)
            ids.append(scores.argmax())
            margins.append(order[-1] - order[-2])
            continue
        scores = scores / sampling.temperature[row]
        mass = np.exp(scores - scores.max())
        margin = np.abs(mass - given.min_p[row])[mass > 0].min() if given.min_p[row] else 1.0
        mass = np.where(mass >= given.min_p[row], mass, 0)
        if sampling.top_k[row]:
            mass = np.where(mass >= np.sort(mass)[::-1][sampling.top_k[row] - 1], mass, 0)
        order = np.argsort(-mass, kind="stable")
        sums = np.cumsum(mass[order]) / mass.sum()
        if sampling.top_p[row] < 1:
            last = np.searchsorted(sums, sampling.top_p[row])
            margin = min(margin, np.abs(sums - sampling.top_p[row]).min())
            mass[order[last + 1 :]] = 0
        gumbel = gumbels(sampling.seed[row : row + 1], positions[row : row + 1])
        keyed = np.where(mass > 0, scores + np.float64(gumbel[0]), -np.inf)
        ids.append(keyed.argmax())
        margins.append(min(margin, keyed.max() - np.sort(keyed)[-2]))
    return np.array(ids), np.array(margins)


ASKED = {
    "bias": biases({3: 9.0}, {519: 8.5, 64: 8.0}, {65: -100.0, 66: 100.0}, {}, {0: 7.0}),
    "frequency": {"frequency": np.linspace(-1, 2, ROWS), **history()},
    "presence": {"presence": np.linspace(-2, 2, ROWS), **history(2)},
    "repetition": {"repetition": np.linspace(0.5, 2, ROWS), **history(3)},
    "penalties": {"frequency": -1, "presence": -0.5, "repetition": np.linspace(0.4, 0.6, ROWS), **history(4)},
    "mask": {"mask": packed(np.random.default_rng(4).random((ROWS, VOCAB)) < 0.03)},
    "min_p": {"min_p": np.linspace(0, 1, ROWS)},
}
ASKED["all"] = {
    **ASKED["bias"],
    "mask": packed(np.random.default_rng(6).random((ROWS, VOCAB)) < 0.7),
    **history(5),
    "frequency": 0.3,
    "presence": 0.2,
    "repetition": 1.3,
    "min_p": 0.05,
    "temperature": [0, 0.7, 1, 1.5] * 2,
    "top_k": [0, 5] * 4,
    "top_p": [1, 1, 0.8, 0.9] * 2,
    "allowed": np.arange(VOCAB) % 7 != 1,
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("what", ASKED)
def test_each_extra_against_numpy(what, warm):
    # red when an extra acts in another order, on another row, or on an id's place in a share instead of on the id
    moved = 0
    for seed in range(4):
        given = case(seed, **{**ASKED[what], **({"temperature": 1.1} if warm else {})})
        choice, _ = sampler(8, "full")(*given)
        ids, margins = expected_ids(*given)
        clear = margins > 1e-4
        assert clear.sum() >= ROWS // 2
        np.testing.assert_array_equal(np.asarray(choice.ids)[clear], ids[clear])
        assert np.asarray(choice.finite).all()
        moved += (expected_ids(*given[:3], extras.neutral(ROWS, VOCAB), *given[4:])[0] != ids).sum()
    assert moved or (what == "min_p" and not warm)  # greedy draws the likeliest anyway


def test_neutral_extras_change_no_bit():
    # red when a logit is moved by what was not asked for: counts and prompts are there, their weights are neutral
    random = np.random.default_rng(3)
    options = {
        "temperature": random.choice([0, 0.3, 1, 5], ROWS),
        "top_p": random.choice([1, 0.9, 0.5], ROWS),
        "top_k": random.choice([0, 1, 7, 150], ROWS),
    }
    for seed in range(5):
        given = case(seed, **options, **history(seed))
        plain, (full, _) = sampler(8, "plain")(*given), sampler(8, "full")(*given)
        for one, other in zip(plain, full, strict=True):
            np.testing.assert_array_equal(one, other)


def test_logprobs_are_of_the_logits_as_they_came():
    # red when a penalty, the mask, the temperature or a cut enters the reported probability
    given = case(1, **ASKED["all"])
    choice, top = sampler(8, "full")(*given)
    logits, allowed = given[:2]
    scores = np.where(allowed, np.float64(logits), -np.inf)
    logprobs = (
        scores
        - scores.max(1, keepdims=True)
        - np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1, keepdims=True))
    )
    np.testing.assert_allclose(choice.logprobs, logprobs[np.arange(ROWS), choice.ids], rtol=1e-5, atol=1e-5)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(top.ids, order)
    np.testing.assert_allclose(top.logprobs, np.take_along_axis(logprobs, order, 1), rtol=1e-5, atol=1e-5)


def test_the_drawn_id_has_one_logprob():
    # red when the two are computed differently: a client finds its token among the alternatives
    choice, top = sampler(8, "full")(*case(2))
    np.testing.assert_array_equal(top.ids[:, 0], choice.ids)
    np.testing.assert_array_equal(top.logprobs[:, 0], choice.logprobs)


def test_alternatives_that_tie_and_that_are_missing():
    # red when a tie goes to the later share, or an id that may not be drawn is offered
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1, [500, 70, 3]] = 2
    logits[2, :65] = 3  # all of the first share are among the best
    _, top = sampler(8, "full")(*case(logits=logits))
    assert top.ids[1, :5].tolist() == [3, 70, 500, 0, 1]
    assert top.ids[2].tolist() == list(range(70))
    allowed = np.isin(np.arange(VOCAB), [3, 70, 71, 500])
    _, top = sampler(8, "full")(*case(logits=logits, allowed=allowed))
    assert top.ids[0].tolist() == [3, 70, 71, 500] + [-1] * 66
    assert top.ids[1].tolist() == [3, 70, 500, 71] + [-1] * 66
    assert np.asarray(top.logprobs)[0, 4:].tolist() == [-np.inf] * 66


def test_a_row_with_nothing_to_draw_is_not_believed():
    # red when the id of an empty row looks like a draw; its neighbours go on
    mask = np.ones((ROWS, VOCAB), bool)
    mask[2] = False
    mask[3], allowed = np.arange(VOCAB) == 9, np.arange(VOCAB) != 9
    for temperature in (0, 1):
        choice, _ = sampler(8, "full")(*case(mask=packed(mask), allowed=allowed, temperature=temperature))
        assert np.asarray(choice.finite).tolist() == [row not in (2, 3) for row in range(ROWS)]


def test_rows_that_are_not_finite_stay_named():
    # PF-55: red when the mask hides what is broken
    given = case(mask=packed(np.arange(VOCAB)[None] < np.full((ROWS, 1), 5)))
    given[0][4, 300], given[0][5, 2] = np.nan, np.inf
    choice, _ = sampler(8, "full")(*given)
    assert np.asarray(choice.finite).tolist() == [row not in (4, 5) for row in range(ROWS)]


def test_the_devices_do_not_change_a_draw():
    given = case(7, **ASKED["all"])
    (one, top_one), (eight, top_eight) = (sampler(devices, "full")(*given) for devices in (1, 8))
    np.testing.assert_array_equal(one.ids, eight.ids)
    np.testing.assert_array_equal(top_one.ids, top_eight.ids)
    np.testing.assert_allclose(one.logprobs, eight.logprobs, rtol=1e-5, atol=1e-6)


def test_counting():
    # red when an id of another share wraps round, or a row that emitted nothing is counted
    drawn, emitted = jnp.zeros((4, 10), jnp.int32), np.array([True, True, False, True])
    for offset in (0, 10, 20):
        got = extras.book(drawn, np.array([3, 1, 0, -1]), np.array([12, 9, 11, 25]), emitted, offset)
        expected = np.array(drawn)
        for row, token in ((3, 12), (1, 9), (-1, 25)):
            if offset <= token < offset + 10:
                expected[row, token - offset] += 1
        np.testing.assert_array_equal(got, expected)
