"""Sequences cut over the devices that share the heads compute what whole ones do: dense and chosen rows, in rows and in pages."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.cache import MlaCache
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.slots import SlotsError, SlotSteps
from tests.parity.models import CAPACITY, TINY, TOLERANCE, Slots, assert_logits, golden, logits, prompt
from tests.parity.quick import ids, quick
from tests.slot_pool import Pool, scores

PRO = Path(__file__).parents[1] / "fixtures" / "k31-tiny"
CUT = ("heads", "ffn", "expert_ffn", "vocab")


def cut(mesh: dict[str, int], run: int, heads: tuple[str, ...] | None = None, sequence: str = "inner") -> Layout:
    """A layout that cuts heads over the mesh axes in an order, and the sequence over one of them or another."""
    order = tuple(mesh) if heads is None else heads
    return Layout("cut", mesh=mesh, axes=dict.fromkeys(CUT, order), cache={"sequence": sequence}, interleave=run)


FOUR = {"outer": 2, "inner": 2}
LAYOUTS = {
    "whole": load_layout("single"),
    "dcp8": load_layout("tp8-dcp8"),
    # neighbours' heads are gathered, then others' than neighbours' (heads in the reverse order)
    "dcp2": cut({"outer": 4, "inner": 2}, 2),
    "dcp4": cut({"outer": 2, "inner": 4}, 1, ("inner", "outer")),
    # the other run lengths
    "dcp2-single": cut({"outer": 4, "inner": 2}, 1, ("inner", "outer")),
    "dcp4-pairs": cut({"outer": 2, "inner": 4}, 2),
    "dcp8-pairs": replace(load_layout("tp8-dcp8"), interleave=2),
    "quick2": cut(FOUR, 1, ("inner", "outer")),
    "quick4": cut({"inner": 4}, 2),
    # devices that share a sequence and hold the same heads: nothing to gather, but parts to be summed
    "apart": cut(FOUR, 3, ("outer",)),
}


@cache
def load(folder: Path, layout: str) -> Kimi:
    return kimi_jax.load(folder, LAYOUTS[layout], "float32", max_seq_len=CAPACITY, prefill_chunk=16)


@cache
def pro_golden() -> dict[str, np.ndarray]:
    with np.load(PRO / "golden.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith("prompt")}


@cache
def token_by_token() -> tuple[Slots, list[np.ndarray]]:
    """Kimi-K3 after four prompts of 1, 7, 16 and 33 tokens, and their scores."""
    rows = Slots(load(TINY, "dcp8"), 4)
    return rows, rows.run([prompt(index) for index in (0, 3, 4, 5)], 1)


def test_golden_scores_one_token_at_a_time():
    # red when a rank's part is weighed by a logarithm to base 2, heads come back to another device, a device that does not own
    # the token writes it, or one that holds no row yet gives not a number
    for index, got in zip((0, 3, 4, 5), token_by_token()[1], strict=True):
        assert_logits(got, logits(index))


def test_every_device_holds_its_positions_and_nothing_else():
    # red when a device keeps rows of others, leaves gaps, or another order than the rule's
    rows, _ = token_by_token()
    for entry in rows.cache:
        if not isinstance(entry, MlaCache):
            continue
        shards = {shard.index[1].start or 0: np.asarray(shard.data) for shard in entry.latent.addressable_shards}
        held = [shards[start] for start in sorted(shards)]
        assert len(held) == 8 and all(part.shape[1] == CAPACITY // 8 for part in held)
        for row, length in enumerate(rows.position):
            for rank, part in enumerate(held):
                own = len(range(rank, length, 8))
                assert part[row, :own].any(axis=-1).all()
                assert not part[row, own:].any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dcp8", "dcp2", "dcp4"])
def test_golden_scores_in_calls_of_sixteen(layout):
    # red when a call that begins in the middle of a run is dealt from its beginning, or hides rows by their columns
    rows = Slots(load(TINY, layout), 4)
    for index, got in zip((0, 3, 5, 6), rows.run([prompt(index) for index in (0, 3, 5, 6)], 16), strict=True):
        assert_logits(got, logits(index))


@pytest.mark.slow
def test_golden_continuation():
    # red when the loop over steps carries another length than the cache holds
    index, tokens = int(golden()["greedy/prompt"]), golden()["greedy/tokens"].tolist()
    answer = load(TINY, "dcp8").generate(prompt(index), len(tokens), ignore_eos=True)
    assert list(answer.token_ids) == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, width",
    [("dcp2", 16), ("dcp8", 16), ("dcp4", 1), ("dcp2-single", 16), ("dcp4-pairs", 16), ("dcp8-pairs", 16)],
)
def test_golden_scores_over_chosen_rows(layout, width):
    # red when a device offers columns instead of positions, keys are dealt otherwise than rows, a device with few keys offers
    # position 0, or a chosen row is attended to on two devices or none
    chosen = (0, 3, 5, 6) if width > 1 else (0, 3, 4, 5)
    rows = Slots(load(PRO, layout), 4)
    given = [pro_golden()[f"prompt{index}/ids"].tolist() for index in chosen]
    for index, got in zip(chosen, rows.run(given, width), strict=True):
        assert_logits(got, pro_golden()[f"prompt{index}/logits"])


def small(layout: str) -> Kimi:
    """The model of two layers; a call of 64 tokens gathers the rows, one of 16 the queries."""
    return quick(layout=LAYOUTS[layout], max_seq_len=96, prefill_chunk=64)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["quick4", "quick2", "apart"])
def test_long_and_short_calls(layout):
    # red when gathered rows come rank by rank, the last block of them is placed past its end, or equal heads are summed
    words = ids(90)
    expected = small("whole").logits(words)
    np.testing.assert_allclose(small(layout).logits(words), expected, rtol=0, atol=TOLERANCE)
    (found,) = Slots(small(layout), 1).run([words], 16)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_pages():
    # red when a page holds other tokens than its entry says, or a device numbers rows of a page by the whole page
    kimi = quick(layout=LAYOUTS["quick4"])
    words, rows = ids(27), Pool(kimi, top=520, seed=2)
    expected = np.float64(quick().logits(words))
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    rows.start(3)
    for start, end in ((0, 7), (7, 8), (8, 22)):
        found = rows.feed({3: words[start:end]})
        np.testing.assert_allclose(scores(found, 0), expected[end - 1], rtol=0, atol=TOLERANCE)
    rows.feed({3: words[22:24]}, last=True)
    for at in (24, 25, 26):
        rows.rows.token[3] = words[at]
        np.testing.assert_allclose(scores(rows.decode("full", 1), 3), expected[at], rtol=0, atol=TOLERANCE)


def test_pages_hold_whole_turns():
    # red when a page is accepted that would give devices parts of different sizes
    steps = quick(layout=LAYOUTS["quick4"]).runner.steps
    with pytest.raises(SlotsError, match=r"page = 4: .* whole tiles of 8; nearest that works: 8"):
        SlotSteps(steps, slots=1, pages=8, page=4)


def test_a_cache_holds_whole_turns():
    # red when a length that the devices do not divide is cut short
    steps = quick(layout=LAYOUTS["apart"], max_seq_len=50).runner.steps
    latent = next(entry.latent for entry in steps.describe_cache(2) if isinstance(entry, MlaCache))
    assert steps.capacity == 50 and latent.shape[1] == 54
    assert {shard.data.shape[1] for shard in jax.tree.leaves(steps.new_cache(2))[-1].addressable_shards} == {27}
