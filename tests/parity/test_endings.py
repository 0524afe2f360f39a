"""How a generation ends: budgets, stop ids, a full cache, scores that are not finite (PF-42, PF-55, PF-62)."""

from functools import cache

import numpy as np
import pytest

from kimi_jax.engine.request import Request
from kimi_jax.engine.runner import Runner
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import Slots
from tests.parity.quick import CAPACITY, answers, ids, quick, with_block, with_parameter

pytestmark = pytest.mark.usefixtures("light_compilation")

PROMPT = 5
MOST = 12
EMBEDDING = "model.embed_tokens.weight"


def runner(block: int) -> Runner:
    return quick().runner if block == 16 else one_by_one()


@cache
def one_by_one() -> Runner:
    return with_block(quick(), 1)


def pair(first: Request, second: Request, block: int = 16) -> list[tuple[list[int], str | None]]:
    """Two rows in every test, so that all share one set of programs."""
    return answers(runner(block), [first, second])


@cache
def free(length: int, seed: int) -> list[int]:
    """What follows a prompt when only the budget ends it."""
    request = Request(ids(length, seed), max_tokens=MOST)
    (drawn, reason), _ = pair(request, Request([5], max_tokens=1))
    assert (len(drawn), reason) == (MOST, "length")
    return drawn


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("most", range(1, 11))
def test_max_tokens_is_exact(block, most):
    # red when a block is cut one early or late, or its surplus is given away
    found = pair(Request(ids(PROMPT), max_tokens=most), Request(ids(4, 1), max_tokens=11 - most), block)
    assert found == [(free(PROMPT, 0)[:most], "length"), (free(4, 1)[: 11 - most], "length")]


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("place", [0, 1, 3, 9])
def test_a_stop_id_ends_at_its_first_occurrence(block, place):
    # red when a stop id is checked after the budget, only at the end of a block, or left out of the answer
    expected = free(PROMPT, 0)
    end = expected.index(expected[place]) + 1
    for most in {end, end + 1, MOST, max(end - 1, 1)}:
        request = Request(ids(PROMPT), max_tokens=most, stops=(3, expected[place]))
        stopped, other = pair(request, Request(ids(4, 1), max_tokens=MOST, stops=(3,)), block)
        assert stopped == (expected[: min(end, most)], "stop" if end <= most else "length")
        assert other == (free(4, 1), "length")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31])
def test_a_full_cache_ends_with_length(length):
    # red when a row goes on past its cache, where writes land on old rows, or stops before the cache is full
    request = Request(ids(length, length), max_tokens=100)
    (drawn, reason), other = pair(request, Request(ids(4, 1), max_tokens=MOST))
    assert (len(drawn), reason) == (CAPACITY - length + 1, "length")
    scores = Slots(quick(), 2).run([ids(length, length) + drawn[:-1], []], 16)[0]
    assert drawn == scores[length - 1 :].argmax(axis=-1).tolist()
    assert other == (free(4, 1), "length")


@pytest.mark.parametrize("width", [1, 16])
def test_writes_past_the_end_are_dropped(width):
    # red when a dynamic slice clamps the write onto the last rows
    rows = Slots(quick(), 2)
    rows.run([ids(CAPACITY), ids(20)], 16)
    full, other = rows.of_row(0), rows.of_row(1)
    rows.feed([ids(width, 9), []], width)
    np.testing.assert_array_equal(rows.of_row(0)[-1], full[-1])
    for got, before in zip(rows.of_row(1), other, strict=True):
        np.testing.assert_array_equal(got, before)


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_end_their_row_only(block, value):
    # red when an argmax over NaN becomes a token, or the error spreads over the batch
    victim, other = free(6, 1), free(7, 2)
    elsewhere = {*other, *ids(6, 1), *ids(7, 2)}
    place = next(p for p, token in enumerate(victim) if p > 1 and token not in {*elsewhere, *victim[:p]})

    def poison(table: np.ndarray) -> np.ndarray:
        table[victim[place]] = value
        return table

    requests = [Request(ids(6, 1), max_tokens=MOST), Request(ids(7, 2), max_tokens=MOST)]
    poisoned = with_parameter(runner(block), EMBEDDING, poison)
    for _ in range(2):  # the second time in a slot that held NaN
        assert answers(poisoned, requests) == [(victim[: place + 1], "error"), (other, "length")]
        assert answers(poisoned, requests[::-1]) == [(other, "length"), (victim[: place + 1], "error")]
    assert answers(poisoned, [Request([5, victim[place]]), requests[1]]) == [([], "error"), (other, "length")]


def test_only_allowed_ids_are_drawn():
    # red when a masked id can still win
    allowed = np.isin(np.arange(quick().config.vocab), [8, 11, 300])
    masked = Runner(quick().runner.steps, quick().runner.params, allowed, quick().runner.chunk)
    for drawn, _ in answers(masked, [Request(ids(4), max_tokens=20), Request(ids(9), max_tokens=20)]):
        assert set(drawn) <= {8, 11, 300}
