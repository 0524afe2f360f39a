"""How one drawn id is booked: stop ids first, then the budget, then the end of the cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Rows, book
from kimi_jax.ops.sample.api import Choice


def advance(token, *, budget=5, position=10, capacity=100, stops=(7, -1), status=RUNNING, finite=True, fed=1):
    rows = Rows(*(jnp.array([value]) for value in (3, position, budget, status)))
    choice = Choice(jnp.array([token]), jnp.zeros(1), jnp.array([finite]))
    after, emitted = book(rows, choice, fed, jnp.array([stops]), capacity)
    return tuple(int(value[0]) for value in after), bool(emitted[0])


@pytest.mark.parametrize(
    ("options", "status"),
    [  # PF-42
        ({}, RUNNING),
        ({"token": 7}, STOPPED),
        ({"token": 7, "budget": 1}, STOPPED),  # red when the budget is asked first
        ({"budget": 1}, LENGTH),
        ({"budget": 2}, RUNNING),
        ({"position": 98}, RUNNING),
        ({"position": 99}, LENGTH),  # PF-62: the drawn id has no place any more
        ({"token": 7, "position": 99}, STOPPED),
        ({"finite": False}, BROKEN),
        ({"finite": False, "token": 7}, BROKEN),  # red when the id of a broken row is believed
    ],
)
def test_verdicts(options, status):
    options = {"token": 4, **options}
    (token, position, budget, got), emitted = advance(**options)
    assert got == status
    assert emitted == options.get("finite", True)
    assert token == (options["token"] if emitted else 3)
    assert (position, budget) == (options.get("position", 10) + 1, options.get("budget", 5) - 1)


@pytest.mark.parametrize("status", [STOPPED, LENGTH, BROKEN])
def test_a_finished_row_stays_as_it_is(status):
    assert advance(7, status=status, finite=False) == ((3, 10, 5, status), False)


def test_a_prompt_counts_whole():
    (_, position, _, status), _ = advance(4, position=90, fed=np.array([10]))
    assert (position, status) == (100, LENGTH)


def test_an_empty_slot_matches_no_id():
    assert advance(-1, stops=(-1, -1))[0][3] == STOPPED  # so ids must never be negative: sampling gives 0..vocab-1
