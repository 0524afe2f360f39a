"""Through slots and pages, k3-tiny gives its golden scores and text; and kernels give what XLA gives."""

import numpy as np
import pytest

from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TOLERANCE, golden, logits, prompt, tiny
from tests.parity.quick import SIZES, ids, quick
from tests.slot_pool import Pool, scores

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_compilation")]

PROMPTS = {0: 6, 1: 3, 2: 5, 3: 4}
"""Of each slot: of 80, 7, 33 and 16 tokens; the second has golden text."""

LAYOUTS = ["tp8-lean"]
"""It cuts most; `dp2-tp4` is test_slots.py's, and `single`, `tp8`, `ep8` were seen to pass."""


def log_softmax(rows: np.ndarray) -> np.ndarray:
    wide = np.float64(rows)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_goldens(layout):
    # red when any of test_slots.py's faults sits in a kind of layer or in a cut that the quick model lacks
    rows = Pool(tiny(layout), top=384, page=16, seed=5)
    prompts = {slot: prompt(index) for slot, index in PROMPTS.items()}
    expected = {slot: log_softmax(logits(index)) for slot, index in PROMPTS.items()}
    assert PROMPTS[1] == golden()["greedy/prompt"]
    rows.start(*prompts)
    text = []
    for first in range(0, 80, 9):
        for pair in ((0, 2), (1, 3)):  # a slot of each group
            parts = {slot: prompts[slot][first : first + 9] for slot in pair if first < len(prompts[slot])}
            ends = {slot: first + len(part) for slot, part in parts.items()}
            if not parts:
                continue
            found = rows.feed(parts, last=(1 in parts))
            for row, slot in enumerate(parts):
                got, wanted = scores(found, row), expected[slot][ends[slot] - 1]
                np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE, err_msg=f"slot {slot} at {ends[slot]}")
            text += [found.ids[0, 0]] if 1 in parts else []
        rows.rows.status[3] = 4  # its first id is not wanted: it waits
        if len(text) < 16:
            text += rows.decode("full", 3).ids[1, :3].tolist()
        rows.poison(np.nan)
    assert text[:16] == golden()["greedy/tokens"].tolist()


def test_kernels_read_pages():
    # red when a layer hands a kernel another table or pool than XLA
    prompt = ids(50)
    rows = Pool(quick(impl="interpret", max_seq_len=64), top=SIZES["vocab_size"], page=32, pages=8, seed=1)
    expected = log_softmax(quick(max_seq_len=64).logits(prompt))
    rows.start(1, 2)
    for start in range(0, 45, 15):
        found = rows.feed({1: prompt[start : start + 15], 2: prompt[start : start + 9]}, last=start == 30)
        np.testing.assert_allclose(scores(found, 0), expected[start + 14], rtol=0, atol=TOLERANCE)
    for at in range(45, 50):
        rows.rows.token[1] = prompt[at]
        np.testing.assert_allclose(scores(rows.decode("full", 1), 1), expected[at], rtol=0, atol=TOLERANCE)
