"""The golden logits by every way a prompt can be cut, and in every company (PF-03, PF-05, PF-06, PF-10, PF-11)."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.cache import KdaCache
from tests.parity.models import CAPACITY, GARBAGE, Slots, assert_logits, logits, prompt, tiny

ROWS, WIDTH = 4, 16
PROMPTS = [0, 1, 2, 3, 4, *(pytest.param(long, marks=pytest.mark.slow) for long in (5, 6))]


def slots() -> Slots:
    """Fresh rows; every test of this file uses the same two programs, of 16 tokens and of 1."""
    return Slots(tiny(), ROWS)


def crowd(first: int) -> list[list[int]]:
    """One prompt per row, beginning with a given one."""
    return [prompt((first + offset) % 7) for offset in range(ROWS)]


@pytest.mark.parametrize("index", PROMPTS)
def test_alone(index):
    # red for nearly every mutation of tests/mutations; calls of 64 tokens take the direct form of latent attention
    kimi = tiny(prefill_chunk=64)
    assert_logits(kimi.logits(prompt(index)), logits(index))


@pytest.mark.slow
def test_the_longest_prompt_in_one_call():
    # red as above; all others already fit one call
    assert_logits(tiny(prefill_chunk=80).logits(prompt(6)), logits(6))


def test_scores_of_a_prompt_as_long_as_the_cache():
    # red when the last position is refused, or written over another (PF-62)
    ids = (prompt(6) * 2)[:CAPACITY]
    scores = tiny(prefill_chunk=64).logits(ids)
    assert scores.shape == (CAPACITY, 384)
    assert_logits(scores[:80], logits(6))


@pytest.mark.parametrize("first", PROMPTS)
def test_token_by_token(first):
    # red when the one-token program differs, such as a state read before its update
    for index, scores in enumerate(slots().run(crowd(first), width=1)):
        assert_logits(scores, logits((first + index) % 7))


@st.composite
def schedules(draw):
    """A prompt for each row, and calls (width, tokens of each row) that bring all of them to their ends."""
    chosen = [draw(st.integers(0, 6)) for _ in range(ROWS)]
    left = [len(prompt(index)) for index in chosen]
    calls = []
    while any(left):
        width = draw(st.sampled_from((1, WIDTH, WIDTH)))
        most = [min(width, rest) for rest in left]
        sizes = [
            draw(st.sampled_from((0, 1, 2, 3, size, size)).filter(lambda n, size=size: n <= size)) for size in most
        ]
        if not any(sizes):
            sizes = most
        left = [rest - size for rest, size in zip(left, sizes, strict=True)]
        calls.append((width, sizes))
    return chosen, calls


@settings(max_examples=12)
@given(schedules())
def test_any_cut_in_any_company(schedule):
    # red when a state depends on how a prompt is cut, or an idle row changes one
    chosen, calls = schedule
    rows = slots()
    done = [0] * ROWS
    for width, sizes in calls:
        parts = [prompt(index)[at : at + size] for index, at, size in zip(chosen, done, sizes, strict=True)]
        for row, scores in enumerate(rows.feed(parts, width)):
            assert_logits(scores, logits(chosen[row])[done[row] : done[row] + sizes[row]])
        done = [at + size for at, size in zip(done, sizes, strict=True)]


@pytest.mark.parametrize("width", [1, WIDTH])
def test_padding_changes_nothing_at_all(width):
    # red when padding reaches a state, the router or another row, however little: results are the same to the last bit
    parts = [prompt(4), [], prompt(2), prompt(3)]
    found = []
    for padding in (0, 7, GARBAGE, -GARBAGE):
        rows = slots()
        scores = rows.run(parts, width, padding)
        found.append([*scores, *(array for row in range(ROWS) for array in rows.of_row(row))])
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4])
def test_poison_beyond_a_sequence_is_never_read(value):
    # red when attention multiplies a hidden row by zero instead of leaving it out, or an idle row reaches another
    parts = [prompt(6), [], prompt(3), prompt(5)]
    clean, poisoned = slots(), slots()
    for rows in (clean, poisoned):
        rows.feed([part[:7] for part in parts], WIDTH)
    poisoned.poison(value, 1)
    for width in (1, WIDTH):
        more = [part[at : at + width] for part, at in zip(parts, clean.position, strict=True)]
        for row, (got, expected) in enumerate(zip(poisoned.feed(more, width), clean.feed(more, width), strict=True)):
            np.testing.assert_array_equal(got, expected, err_msg=f"row {row}")


@pytest.mark.parametrize("width", [1, WIDTH])
def test_an_idle_row_keeps_its_state_to_the_last_bit(width):
    # red when a call without tokens of a row decays its state or shifts its window
    rows = slots()
    rows.feed([prompt(3), prompt(4)[:5], prompt(2), []], WIDTH)
    before = rows.of_row(1)
    rows.feed([prompt(4)[:width], [], prompt(5)[:width], prompt(6)[:width]], width)
    for got, expected in zip(rows.of_row(1), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    tail = rows.run([[], prompt(4)[5:], [], []], width)[1]
    assert_logits(tail, logits(4)[5:])


def test_rows_are_independent_sequences():
    # red when a slot number, a length or a position is fixed when the step is compiled (PF-10)
    for shift in range(ROWS):
        rows = slots()
        parts = [[] for _ in range(ROWS)]
        parts[shift] = prompt(5)
        parts[(shift + 1) % ROWS] = prompt(3)
        scores = rows.run(parts, WIDTH)
        assert_logits(scores[shift], logits(5))
        assert_logits(scores[(shift + 1) % ROWS], logits(3))


def test_a_slot_begins_from_nothing():
    # red when reset forgets the state, one of the three windows or the length, or touches another row (PF-11, PF-36)
    rows, neighbour = slots(), prompt(6)
    seen = []
    for index in (5, 2, 5, 0, 1):
        rows.restart(0)
        alone = rows.run([prompt(index), [], [], []], WIDTH)[0]
        assert_logits(alone, logits(index))
        at = rows.position[2]
        seen.append(rows.feed([[], [], neighbour[at : at + 5], []], WIDTH)[2])
        rows.poison(np.nan)
    assert_logits(np.concatenate(seen), logits(6)[:25])


def test_a_poisoned_slot_is_clean_after_reset():
    # red when reset multiplies by zero, which keeps a NaN
    rows = slots()
    rows.feed(crowd(0)[:1] + [[]] * 3, WIDTH)
    rows.poison(np.nan, 0, 1, 2, 3)
    rows.restart(0, 1, 2, 3)
    for index, scores in enumerate(rows.run(crowd(3), WIDTH)):
        assert_logits(scores, logits((3 + index) % 7))


def test_states_stay_float32_and_nothing_changes_its_shape():
    # red when a step returns a state in the dtype of the activations (PF-07), or changes a shape and so recompiles
    rows = slots()
    before = jax.tree.map(lambda array: (array.shape, array.dtype), rows.cache)
    for width in (WIDTH, 1):
        rows.feed([prompt(2)[:width]] * ROWS, width)
        assert jax.tree.map(lambda array: (array.shape, array.dtype), rows.cache) == before
    rows.restart(2)
    assert jax.tree.map(lambda array: (array.shape, array.dtype), rows.cache) == before
    assert all(entry.state.dtype == np.float32 for entry in rows.cache if isinstance(entry, KdaCache))
