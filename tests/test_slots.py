"""Slots and pages: every path through them computes what a sequence alone computes, and touches nothing else.

Run on eight fake devices in two groups, which share nothing but the weights; other layouts have tests of their own below.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.api import Kimi
from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Limits
from kimi_jax.ops.implementation import Implementations
from kimi_jax.slots import WAITING, SlotsError, SlotSteps
from tests.parity.compilations import compilations
from tests.parity.light import light_compilation as light_compilation
from tests.parity.quick import CAPACITY, SIZES, ids, quick
from tests.slot_pool import Pool, scores

pytestmark = pytest.mark.usefixtures("light_compilation")

VOCAB = SIZES["vocab_size"]
WARM = {"temperature": 1.5, "top_p": 0.95, "top_k": 200}


def model() -> Kimi:
    return quick(layout="dp2-tp4")


def pool(**options) -> Pool:
    return Pool(model(), top=VOCAB, **options)


def alone(prompt: list[int], tokens: int, **options) -> list[int]:
    return pool(filled=0.0).run(prompt, tokens, **options)


@pytest.mark.slow
def test_scores_are_those_of_a_cache_without_pages():
    # red when a row is written to or read from another page, page boundaries and all
    prompt, rows = ids(27), pool(seed=2)
    expected = np.float64(model().logits(prompt))
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    rows.start(3)
    for start, end in ((0, 7), (7, 8), (8, 22)):
        found = rows.feed({3: prompt[start:end]})
        np.testing.assert_allclose(scores(found, 0), expected[end - 1], rtol=0, atol=1e-4)
    found = rows.feed({3: prompt[22:24]}, last=True)
    for at in (24, 25, 26):
        rows.rows.token[3] = prompt[at]
        found = rows.decode("full", 1)
        np.testing.assert_allclose(scores(found, 3), expected[at], rtol=0, atol=1e-4)


def test_a_request_in_company_is_what_it_is_alone():
    # red when a state, a page, a position, a budget or a seed goes to another slot's row or to the other group
    asked = ({}, {"seed": 7, **WARM}, {"seed": 8, **WARM})
    prompts, budgets, slots = [ids(20), ids(3, 1), ids(17, 2)], [9, 12, 6], (2, 0, 3)
    expected = [alone(*each, **options) for *each, options in zip(prompts, budgets, asked, strict=True)]
    together, found = pool(seed=3), [[], [], []]
    for slot, options in zip(slots, asked, strict=True):
        together.ask(slot, **options)
    together.start(*slots)

    def feed(index, start, end):
        last = end >= len(prompts[index])
        drawn = together.feed({slots[index]: prompts[index][start:end]}, last=last, budget=budgets[index])
        found[index] += drawn.ids[drawn.ids >= 0].tolist()

    def decode(steps):
        drawn = together.decode("full", steps)
        for index, slot in enumerate(slots):
            found[index] += drawn.ids[slot][drawn.ids[slot] >= 0].tolist()

    feed(0, 0, 13)
    feed(1, 0, 3)
    decode(2)  # a prompt waits half done while another slot draws
    feed(2, 0, 16)
    feed(0, 13, 20)
    decode(3)
    feed(2, 16, 17)
    while RUNNING in together.rows.status:
        together.poison(np.nan)
        decode(4)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "random"])
def test_plain_programs_draw_what_the_full_one_draws(kind):
    # red when an extra that is not asked for moves a logit, or programs disagree about a position or the noise
    for options in ({}, {"seed": 5, **WARM}) if kind == "random" else ({},):
        assert alone(ids(20), 12, kind=kind, **options) == alone(ids(20), 12, kind="full", **options)


def test_what_no_sequence_holds_is_never_read():
    # red when a hidden row or an idle state is multiplied by zero instead of left out: poison is not a number
    found = []
    for filled in (0.0, np.nan):
        rows = pool(filled=filled)
        rows.start(1, 3)
        first = [
            rows.feed({1: ids(16), 3: ids(5, 1)}),
            rows.feed({3: ids(3, 2)}, last=True),
            rows.feed({1: ids(4)}, last=True),
        ]
        rows.poison(filled)
        found.append((first, rows.decode("full", 5)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_call_changes_nothing_of_other_slots_and_pages(call):
    # red when an idle row is written to the page or the state that its garbage names, or past the end of a page elsewhere
    rows = pool(filled=0.0)
    rows.start(0, 1, 2)
    rows.feed({0: ids(8), 2: ids(11, 1)}, last=True)
    rows.rows.status[0] = LENGTH  # slot 0 rests, with a table that is real
    rows.feed({1: ids(15, 2)})
    rows.rows.status[1] = LENGTH
    rows.poison(7.0)
    before = jax.device_get(rows.cache)
    start = int(rows.rows.position[2])
    if call == "prefill":
        rows.feed({2: ids(7, 3)})
    else:
        rows.decode("full", 7)
    written = {(rows.page_of(2, at), at % 8) for at in range(start, start + 7)}
    assert len({page for page, _ in written}) == 2
    for old, new in zip(before.layers, rows.cache.layers, strict=True):
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            changed = np.argwhere((a != np.asarray(b)).reshape(*a.shape[:2], -1).any(axis=-1)).tolist()
            expected = [list(at) for at in sorted(written)]
            assert {at[0] for at in changed} == {2} if type(old).__name__ == "KdaCache" else changed == expected
    drawn = np.asarray(rows.cache.seen.drawn) - before.seen.drawn
    assert drawn[[0, 1, 3]].any() == 0 and drawn[2].sum() == (0 if call == "prefill" else 7)


def test_a_hit_is_a_cold_run_to_the_last_bit():
    # red when a window or a state is left out of a checkpoint, is taken at the end of the prompt instead of at the page
    # (PF-37), or a fork changes what it started from (PF-35)
    prompt = ids(20)
    rows = pool(seed=1)
    rows.start(0)
    rows.feed({0: prompt[:16]})
    rows.save(0, 1)
    cold = rows.feed({0: prompt[16:]}, last=True), rows.decode("full", 6)
    kept = [np.asarray(array)[1] for array in jax.tree.leaves(rows.cache.kept)]
    shared = rows.places[0].pages[:2]
    for slot in (1, 0):
        rows.start(slot, pages={slot: shared}, checkpoint=1, at=16)
        warm = rows.feed({slot: prompt[16:]}, last=True), rows.decode("full", 6)
        np.testing.assert_array_equal(warm[0].logprobs, cold[0].logprobs)
        np.testing.assert_array_equal(warm[1].ids[slot, :6], cold[1].ids[0, :6])
        np.testing.assert_array_equal(warm[1].logprobs[slot, :6], cold[1].logprobs[0, :6])
        rows.rows.status[slot] = LENGTH
        other = rows.feed({slot: ids(3, 9)})
        assert other.ids[0, 0] == -1
    for array, before in zip(jax.tree.leaves(rows.cache.kept), kept, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[1], before)
        assert array.dtype == before.dtype and before.any()


def test_saving_and_restoring_touch_what_they_name():
    # red when -1 counts from the end, or a copy goes to the other group
    rows = pool(filled=7.0)
    rows.start(1)
    rows.feed({1: ids(9)})
    for slot, checkpoint in ((0, 0), (2, 0), (2, 1)):
        rows.save(slot, checkpoint)  # sevens; nothing is kept as the second of the first group
    before, (slots, checkpoints) = jax.device_get(rows.cache), rows.pairs(1, 1)
    nothing = np.full_like(slots, -1)

    def changed(field):
        pairs = zip(jax.tree.leaves(getattr(before, field)), jax.tree.leaves(getattr(rows.cache, field)), strict=True)
        return {int(row) for old, new in pairs for row in np.argwhere(old != np.asarray(new))[:, 0]}

    rows.cache = rows.programs.save(rows.cache, slots, nothing)
    assert not changed("kept")
    rows.cache = rows.programs.save(rows.cache, nothing, checkpoints)
    assert not changed("kept")
    rows.cache = rows.programs.restore(rows.cache, checkpoints, nothing)
    assert not changed("layers")
    rows.save(1, 1)
    assert changed("kept") == {1} and not changed("layers")
    rows.cache = rows.programs.restore(rows.cache, nothing, slots)
    assert changed("layers") == {1} and not any(array.any() for array in rows.state(1))


def test_a_row_without_pages_pauses_and_goes_on():
    # red when a row writes past its pages, or a pause changes what it draws
    expected = alone(ids(14), 12)
    rows = pool(filled=0.0)
    rows.start(0)
    found = rows.feed({0: ids(14)}, last=True, budget=12).ids[0].tolist()
    for room, drawn in ((None, 1), (16, 1), (16, 0), (24, 8)):
        block = rows.decode("full", 1 if room is None else 16, room=room)
        assert (block.ids[0] >= 0).sum() == drawn
        found += block.ids[0][block.ids[0] >= 0].tolist()
        assert rows.rows.status[0] == RUNNING
    found += [i for i in rows.decode("full").ids[0].tolist() if i >= 0]
    assert found == expected and rows.rows.status[0] == LENGTH


def test_how_a_row_ends():
    # red when stops, budget or the end of the cache are asked of another row, or a first id is not booked
    rows = pool(filled=0.0)
    drawn = alone(ids(5), 6)
    rows.start(0, 1, 2)
    rows.stops[1, 3] = drawn[0]
    rows.stops[2, 0] = drawn[2]
    first = rows.feed({0: ids(5), 1: ids(5)}, last=True, budget=3)
    rows.feed({2: ids(5)}, last=True)
    assert first.ids[:, 0].tolist() == [drawn[0]] * 2
    assert rows.rows.status[:3].tolist() == [RUNNING, STOPPED, RUNNING]
    assert rows.rows.budget[:2].tolist() == [2, 2]
    block = rows.decode("full")
    assert block.ids[0, :3].tolist() == [*drawn[1:3], -1] and block.ids[2, :3].tolist() == [*drawn[1:3], -1]
    assert (block.ids[1] == -1).all()
    assert rows.rows.status[:3].tolist() == [LENGTH, STOPPED, STOPPED]
    whole = pool(filled=0.0).run(ids(20), 1000)  # PF-62
    assert len(whole) == CAPACITY - 20 + 1


@pytest.mark.parametrize("last", [False, True])
def test_a_prompt_that_is_not_finite_is_named_at_every_chunk(last):
    # PF-39, PF-55: red when only a row that draws is looked at, or a neighbour is
    rows = pool(filled=0.0)
    rows.start(0, 1)
    rows.give(1, 4)
    rows.poison(np.nan)  # of slot 0, which has no page yet
    drawn = rows.feed({0: ids(4), 1: ids(4)}, last=last)
    assert rows.rows.status[:2].tolist() == [BROKEN, RUNNING if last else WAITING]
    assert (drawn.ids[:, 0] >= 0).tolist() == [False, last]


class TestExtras:
    """What needs more than one step, or the way from the host."""

    def test_penalties_count_what_is_drawn_over_calls_and_blocks(self):
        # red when the first id, an id of an earlier block or one of another slot is not counted, or counted twice
        rows, counted = pool(seed=4), np.zeros((4, VOCAB), np.int32)
        prompt, shift = ids(5), {ids(5)[0]: 7.0, VOCAB - 1: 6.5, 17: -2.0}
        plain = alone(ids(5), 12)
        for slot in (2, 3):
            rows.ask(slot, frequency=0.9, presence=0.4, bias=shift)
            rows.start(slot)
            counted[slot, plain[0]] = slot - 1  # as of ids drawn before the request was put off
            rows.count(slot, np.zeros(VOCAB, bool), counted[slot])
        found = [rows.feed({2: prompt, 3: prompt}, last=True)]
        found += [rows.decode("full", steps) for steps in (3, 1, 7)]
        for slot, row in ((2, 0), (3, 1)):
            for block, steps in zip(found, (1, 3, 1, 7), strict=True):
                row = row if block is found[0] else slot
                for step in range(steps):
                    logits = scores(block, row, step)
                    count = counted[slot]
                    expected = logits - np.float32(0.9) * count - np.float32(0.4) * (count > 0)
                    expected[list(shift)] += list(shift.values())
                    token = block.ids[row, step]
                    assert token == expected.argmax()
                    assert block.logprobs[row, step] == logits[token]
                    counted[slot, token] += 1
            np.testing.assert_array_equal(np.asarray(rows.cache.seen.drawn)[slot], counted[slot])
        assert counted[2].max() > 1 and counted[2].tolist() != counted[3].tolist()

    def test_a_mask_for_every_step(self):
        # red when the mask of another row or step is used, or bits are read from the other end
        rows, allowed = pool(), np.random.default_rng(0).permutation(VOCAB)[:60].reshape(6, 10)
        rows.start(1, 2)
        for step, some in enumerate(allowed):
            rows.ask(1, mask=some)
            if step == 0:
                drawn = rows.feed({1: ids(4), 2: ids(4)}, last=True)
                row, other = 0, [drawn.ids[1, 0]]
            else:
                drawn, row = rows.decode("full", 1), 1
                other.append(drawn.ids[2, 0])
            best = some[scores(drawn, row)[some].argmax()]
            assert drawn.ids[row, 0] == best
        assert other == alone(ids(4), 6)

    def test_a_mask_that_lets_nothing_through_ends_the_row(self):
        # red when id 0 is drawn for want of another
        rows = pool()
        rows.start(0)
        rows.feed({0: ids(4)}, last=True)
        rows.ask(0, mask=[])
        assert rows.decode("full", 3).ids[0, 0] == -1 and rows.rows.status[0] == BROKEN


def test_after_the_first_calls_nothing_compiles():
    # red when a slot, a page, a length, an option or where an argument comes from is part of a program (PF-10, PF-64)
    rows = pool(filled=0.0)
    rows.run(ids(20), 3)
    rows.save(0, 0)
    with compilations() as count:
        for length, slot in ((1, 3), (31, 1), (16, 2)):
            options = {"temperature": 0.3, "top_k": 3, "bias": {5: 1.0}, "min_p": 0.2} if slot == 3 else {}
            other = pool(filled=0.0, seed=length)
            other.run(ids(length), 9, slot=slot, **options)
            other.save(slot, 1)
            other.start(slot, checkpoint=1, at=8)
        assert count() == 0


def test_results_of_a_program_are_arguments_as_host_arrays_are():
    # red when rows that never left the device make another program
    rows = pool(filled=0.0)
    rows.run(ids(5), 3)
    rows.start(0)
    rows.feed({0: ids(5)}, last=True)
    p, params = rows.programs, rows.kimi.runner.params
    rows.give(0, 20)
    tables = np.stack([rows.table(slot) for slot in range(4)])
    given = (rows.sampling, rows.extras, Limits(rows.allowed, rows.stops), np.int32(2))
    with compilations() as count:
        rows.cache, held, _ = p.decode("full")(params, rows.cache, tables, rows.rows, *given)
        rows.cache, held, drawn = p.decode("full")(params, rows.cache, tables, held, *given)
        assert count() == 0
    assert (np.asarray(drawn.ids)[0] >= 0).sum() == 2


def test_caches_are_donated():
    # red without donation, and when an array comes back in a dtype or place that cannot reuse the one given
    rows = pool(filled=0.0)
    rows.start(0)
    first = rows.cache
    rows.feed({0: ids(5)}, last=True)
    rows.decode("full", 1)
    rows.save(0, 0)
    assert all(array.is_deleted() for array in jax.tree.leaves(first))
    second = rows.cache
    rows.start(1)
    assert all(array.is_deleted() for entry in second.layers[:1] for array in entry)
    assert not any(array.is_deleted() for array in jax.tree.leaves(rows.cache))


def test_sizes_that_do_not_fit_are_named_together():
    steps = model().runner.steps
    with pytest.raises(SlotsError) as raised:
        SlotSteps(steps, slots=0, pages=13, page=12, checkpoints=-1, top=VOCAB + 1)
    assert len(raised.value.problems) == 5
    assert "pages = 13" in str(raised.value) and "nearest that works: 12" in str(raised.value)
    assert "page = 12" in str(raised.value) and "nearest that works: 8" in str(raised.value)


def test_a_pool_that_kernels_cannot_address_is_refused_before_anything_is_compiled():
    # red when the kernels' own check speaks at the first call
    steps = model().runner.steps
    kernels = dataclasses.replace(
        steps,
        capacity=64,
        precision=dataclasses.replace(steps.precision, latent=np.dtype(ml_dtypes.float8_e4m3fn)),
        impls=Implementations(mla="pallas"),
    )
    with pytest.raises(SlotsError, match=r"lies between 2\^31 and 2\^32"):
        SlotSteps(kernels, slots=2, pages=2 * 3_000_000, page=32)
    with pytest.raises(SlotsError, match=r"nearest that works: 32$"):
        SlotSteps(kernels, slots=2, pages=2, page=16)
    SlotSteps(kernels, slots=2, pages=2 * 1_000_000, page=32)
