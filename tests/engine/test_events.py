"""What a block of steps tells the host: every id once, in order, and each request's end once."""

import numpy as np

from kimi_jax.engine.request import Event
from kimi_jax.engine.runner import _events
from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Drawn, Rows


def events(ids, status, open_rows):
    drawn = Drawn(np.array(ids, np.int32), -np.arange(np.size(ids), dtype=np.float32).reshape(np.shape(ids)))
    rows = Rows(None, None, None, np.array(status, np.int32))
    return list(_events(drawn, rows, open_rows))


def test_ids_come_row_by_row_and_the_last_one_carries_the_end():
    still = {0, 1, 2}
    got = events([[5, 6, -1], [7, 8, 9], [4, -1, -1]], [STOPPED, RUNNING, LENGTH], still)
    assert got == [
        Event(0, 5, 0.0),
        Event(0, 6, -1.0, "stop"),
        Event(1, 7, -3.0),
        Event(1, 8, -4.0),
        Event(1, 9, -5.0),
        Event(2, 4, -6.0, "length"),
    ]
    assert still == {1}  # red when a finished request is read again: idle rows draw -1


def test_rows_that_are_closed_or_idle_are_not_read():
    assert events([[5], [6]], [LENGTH, LENGTH], {1}) == [Event(1, 6, -1.0, "length")]


def test_a_broken_row_keeps_its_ids_and_ends_without_one():  # PF-55
    got = events([[5, 6, -1], [-1, -1, -1]], [BROKEN, BROKEN], {0, 1})
    assert got == [Event(0, 5, 0.0), Event(0, 6, -1.0), Event(0, None, 0.0, "error"), Event(1, None, 0.0, "error")]


def test_an_end_without_a_new_id_is_told():
    assert events([[-1]], [LENGTH], {0}) == [Event(0, None, 0.0, "length")]
