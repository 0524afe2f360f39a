"""Kimi K3.1 Pro: the golden logits by every way a prompt can be cut, in rows and in pages, on one device and on eight."""

import numpy as np
import pytest

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.config import ConfigError
from kimi_jax.engine.request import MAX_STOPS
from kimi_jax.problems import ProblemsError
from tests.parity.k31 import golden, logits, prompt, tiny
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import GARBAGE, Slots, assert_logits
from tests.slot_pool import Pool

pytestmark = pytest.mark.usefixtures("light_compilation")

ROWS, WIDTH = 4, 16
CROWDS = ((6, 3, 0, 4), (5, 2, 1, 6))


def assert_crowd(rows: Slots, crowd, width: int = WIDTH) -> None:
    for index, scores in zip(crowd, rows.run([prompt(index) for index in crowd], width), strict=True):
        assert_logits(scores, logits(index))


@pytest.mark.parametrize("crowd", CROWDS)
def test_in_chunks(crowd):
    # red for nearly every mutation of tests/mutations/indexer.py, and when a chunk's own keys are not written before it scores
    assert_crowd(Slots(tiny(), ROWS), crowd)


@pytest.mark.parametrize("sizes", [(3, 0, 5), (1, 7, 2), (8, 1)], ids=str)
def test_in_ragged_chunks(sizes):
    # red when keys of a call that ran dense are not in the cache, or an idle row's are overwritten; each row another size
    rows = Slots(tiny(), ROWS)
    crowd, done, turn = CROWDS[1], [0] * ROWS, 0
    while any(done[row] < len(prompt(index)) for row, index in enumerate(crowd)):
        parts = [prompt(i)[done[row] :][: sizes[(turn + row) % len(sizes)]] for row, i in enumerate(crowd)]
        for row, scores in enumerate(rows.feed(parts, WIDTH)):
            assert_logits(scores, logits(crowd[row])[done[row] : done[row] + len(parts[row])])
            done[row] += len(parts[row])
        turn += 1


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_poison_beyond_a_sequence_is_never_read(value):
    # red when a stale key or row past the length is a candidate: what a rejected draft leaves behind must not matter
    parts = [prompt(6), [], prompt(4), prompt(5)]
    clean, poisoned = Slots(tiny(), ROWS), Slots(tiny(), ROWS)
    for rows in (clean, poisoned):
        rows.feed([part[:9] for part in parts], WIDTH)
    poisoned.poison(value, 1)
    more = [part[9 : 9 + WIDTH] for part in parts]
    for got, expected in zip(poisoned.feed(more, WIDTH), clean.feed(more, WIDTH), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_padding_changes_nothing_at_all():
    # red when a padded token is a candidate, or writes a key
    found = []
    for padding in (0, GARBAGE):
        rows = Slots(tiny(), ROWS)
        scores = rows.run([prompt(5), [], prompt(2), prompt(3)], WIDTH, padding)
        found.append([*scores, *(array for row in range(ROWS) for array in rows.of_row(row))])
    for got, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("crowd", CROWDS)
def test_token_by_token(crowd):
    # red when the one-token program differs, or the context crosses what is kept during decode
    assert_crowd(Slots(tiny(), ROWS), crowd, width=1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp8", "tp4-ep2"])
def test_layouts(layout):
    # red when devices select differently, or a device's heads attend to another's choice
    rows = Slots(tiny(layout, experts="packed"), ROWS)
    for crowd in CROWDS:
        rows.restart(*range(ROWS))
        assert_crowd(rows, crowd)


@pytest.mark.parametrize("layout", ["ep8", "tp8-lean"])
def test_layouts_that_do_not_divide_it_are_refused(layout):
    # red when 12 experts are dealt to 8 devices unevenly, or the message does not say which number is in the way
    with pytest.raises(ProblemsError, match="12") as caught:
        tiny(layout)
    assert not isinstance(caught.value, ConfigError | CheckpointError)


@pytest.mark.slow
def test_slots_and_pages_continue_greedily():
    # red when keys are written to other pages than latent rows, or a page of another sequence is scored
    index, tokens = int(golden()["greedy/prompt"]), golden()["greedy/tokens"]
    pool = Pool(tiny(), slots=2, pages=8, page=8, checkpoints=1, block=4, calls=1)
    pool.start(0, 1)
    pool.feed({1: prompt(6)[:9]})
    pool.feed({0: prompt(index)[:9]})
    first = pool.feed({0: prompt(index)[9:]}, last=True)
    drawn = [int(np.asarray(first.ids)[0, 0])]
    while len(drawn) < len(tokens):
        drawn += [token for token in np.asarray(pool.decode("greedy", 4).ids)[0].tolist() if token >= 0]
    assert drawn[: len(tokens)] == tokens.tolist()
    assert pool.stops.shape[1] == MAX_STOPS
