"""Every shipped layout on eight fake devices computes what one device computes: scores, states, greedy and drawn text."""

from functools import cache

import jax
import numpy as np
import pytest

from kimi_jax.engine.request import MAX_STOPS
from kimi_jax.loop import RUNNING, Limits, Rows
from kimi_jax.ops.sample.api import Sampling
from tests.parity.compilations import compilations
from tests.parity.models import TOLERANCE, Slots, assert_logits, golden, logits, prompt, tiny
from tests.parity.quick import ids, quick

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tp8-lean", "ep8", "tp4-ep2")]
CUT = ["tp8", "dp2-tp4", *SLOW]
TEXT = ["tp8", pytest.param("dp2-tp4", marks=pytest.mark.slow), *SLOW]

ROWS = (0, 1, 2, 3, 4, 5, 6, 3)
"""The prompt of each row; the greedy golden prompt is there twice, the second time drawn at random."""

WARM = np.array([0, 1, 0, 0, 1, 0, 1, 1], bool)
STEPS = 15


@cache
def scored(layout: str) -> tuple[Slots, list[np.ndarray]]:
    """The rows after their prompts, and their scores. Experts stay packed, as on the target."""
    rows = Slots(tiny(layout, experts="packed"), len(ROWS))
    return rows, rows.run([prompt(index) for index in ROWS], 16)


@cache
def states(layout: str) -> list[list[np.ndarray]]:
    """What each row's cache holds after its prompt, whole."""
    rows, _ = scored(layout)
    return [rows.of_row(row) for row in range(len(ROWS))]


@cache
def drawn(layout: str) -> np.ndarray:
    """Ids [rows, steps] after the best next one of each prompt, drawn by one program for greedy and random rows."""
    states(layout)  # before the cache is given away
    rows, scores = scored(layout)
    count = len(ROWS)
    first = np.array([row[-1].argmax() for row in scores], np.int32)
    begin = Rows(first, rows.position, np.full(count, 100, np.int32), np.full(count, RUNNING, np.int32))
    sampling = Sampling(
        np.where(WARM, 0.8, 0).astype(np.float32),
        np.where(np.arange(count) == 1, 0.7, 1.0).astype(np.float32),
        np.where(np.arange(count) == 4, 20, 0).astype(np.int32),
        np.arange(count, dtype=np.uint32) + 11,
    )
    limits = Limits(np.ones(384, bool), np.full((count, MAX_STOPS), -1, np.int32))
    decode = rows.steps.decode(random=True)
    rows.cache, _, found = decode(rows.params, rows.cache, begin, sampling, limits, np.int32(STEPS))
    return np.concatenate([first[:, None], np.asarray(found.ids)[:, :STEPS]], axis=1)


@pytest.mark.parametrize("layout", ["single", *CUT])
def test_scores_are_golden(layout):
    # red when a partial sum meets a norm or an activation before it is reduced (PF-18), heads or experts land on another
    # device's weights, or a slice of an expert that cuts a scale group is padded wrongly (PF-21, PF-25)
    _, scores = scored(layout)
    for index, got in zip(ROWS, scores, strict=True):
        assert_logits(got, logits(index))


@pytest.mark.parametrize("layout", CUT)
def test_states_are_those_of_one_device(layout):
    # red when a state, a window or a cached row is kept by another head's device, or differs between replicas
    for got, expected in zip(states(layout), states("single"), strict=True):
        for array, reference in zip(got, expected, strict=True):
            np.testing.assert_allclose(array, reference, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.slow), *TEXT])
def test_greedy_text_is_golden(layout):
    # red when the winner of the vocabulary's shards is picked by another rule than the whole vocabulary's
    assert ROWS[3] == golden()["greedy/prompt"]
    np.testing.assert_array_equal(drawn(layout)[3], golden()["greedy/tokens"])


@pytest.mark.parametrize("layout", TEXT)
def test_drawn_text_is_that_of_one_device(layout):
    # red when noise depends on the device or the batch, or top-k and top-p are cut per shard
    np.testing.assert_array_equal(drawn(layout), drawn("single"))
    assert np.any(drawn("single")[7] != drawn("single")[3])


@pytest.mark.parametrize("layout", CUT)
def test_caches_keep_their_sharding(layout):
    # red when a cache leaves a step in another sharding than it came with: its shards are then copied, not donated,
    # and the next call compiles again (PF-64, PF-65)
    scored(layout)
    rows = Slots(tiny(layout, experts="packed"), len(ROWS))
    rows.restart(3)
    for width in (16, 5, 1):
        given = rows.cache
        with compilations() as count:
            rows.feed([prompt(3)[:width]] * len(ROWS), 16)
            assert count() == 0
        assert all(array.is_deleted() for array in jax.tree.leaves(given))


@pytest.mark.slow
def test_the_public_face_gives_the_same_text():
    # red when prefill, which the tests above replace by scores, differs; a model of two layers: its programs compile fast
    prompts = [ids(n, seed=n) for n in (20, 3, 7)]
    given = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.9, "top_p": 0.9, "seed": 5}
    one, cut = (quick(layout=name).generate_batch(prompts, **given) for name in ("single", "dp2-tp4"))
    assert [answer.token_ids for answer in cut] == [answer.token_ids for answer in one]
