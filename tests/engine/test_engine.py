"""An engine's promises one by one, on a device that remembers exactly what it was told."""

import pytest

from kimi_jax.engine.engine import Engine, EngineFull
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.request import Request, RequestError
from tests.engine.fake_device import NAN, PLACE, image
from tests.engine.life import CAPACITY, PAGE, PHRASES, Life, Parity

ROOMY = {"slots": 4, "pages": 40, "checkpoints": 8, "queue": 16, "page": PAGE, "chunk": 16, "spacing": 8}
ODD = [2 * number + 13 for number in range(CAPACITY)]


def life(groups: int = 1, block: int = 4, **sizes) -> Life:
    return Life(EngineLimits(**{**ROOMY, **sizes}), groups, block)


def drawn(life: Life, number: int) -> list[int]:
    return [event.token for event in life.events[number] if event.token is not None]


class TestFairness:
    def test_decoding_goes_on_while_a_long_prompt_is_run(self):
        one = life(chunk=3)
        first = one.submit(Request([20], max_tokens=20))
        one.turn()
        one.submit(Request(ODD[: CAPACITY - 2]))
        for turn in range(1, 7):  # red when prompts are run to their end first
            one.turn()
            assert len(drawn(one, first)) == 1 + turn
        one.run()
        one.check()

    def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(self):
        one = life(chunk=3)
        long, short = one.submit(Request(ODD[: CAPACITY - 2])), one.submit(Request([20, 21]))
        one.turn()
        one.turn()
        assert drawn(one, short) and not drawn(one, long)  # red when the oldest prompt is always first
        one.run()
        one.check()

    def test_those_that_wait_come_in_their_order(self):
        one = life(slots=1)
        numbers = [one.submit(Request([20 + i], max_tokens=2)) for i in range(4)]
        order = []
        while not one.engine.idle:
            order += [event.request for event in one.engine.turn() if event.finish]
        assert order == numbers


class TestSubmit:
    def test_what_can_never_run_is_refused_with_all_its_problems(self):
        with pytest.raises(RequestError) as caught:
            life().submit(Request([500] * 90, logprobs=99))
        assert len(caught.value.problems) == 3

    def test_a_full_queue_says_when_to_come_again(self):
        one = life(queue=2, slots=1)
        for _ in range(2):
            one.submit(Request([20], max_tokens=1))
        with pytest.raises(EngineFull, match="2 requests wait") as caught:
            one.submit(Request([20]))
        assert 1 <= caught.value.retry_after <= 60
        one.turn()  # the queue moves on by one
        one.submit(Request([20], max_tokens=1))
        one.run()
        one.check()


class TestCancel:
    def test_the_slot_is_free_at_once(self):
        one = life(slots=1)
        first, second = one.submit(Request([20], max_tokens=20)), one.submit(Request([21], max_tokens=3))
        one.turn()
        one.cancel(first)
        assert one.engine.stats().running == 0
        one.turn()
        assert drawn(one, second)  # red when the slot comes back a turn later
        one.run()
        one.check()

    @pytest.mark.parametrize("turns", [0, 1, 3])
    def test_while_it_waits_is_run_or_draws(self, turns):
        one = life(chunk=4)
        number = one.submit(Request(ODD[:9], max_tokens=8))
        for _ in range(turns):
            one.turn()
        one.cancel(number)
        one.cancel(number)
        one.engine.cancel(12345)
        assert one.engine.idle
        assert one.engine.turn() == []
        one.check()

    def test_the_others_draw_on(self):
        one = life()
        numbers = [one.submit(Request([20 + i], max_tokens=9)) for i in range(4)]
        one.turn()
        one.cancel(numbers[1])
        one.submit(Request([30], max_tokens=9))
        one.run()
        one.check()


class TestImages:
    @pytest.mark.parametrize("chunk", [1, 3, 16, 40])
    def test_any_chunks_beside_text(self, chunk):
        # red when a border inside an image loses its place, or a call with an image makes another program (PF-64)
        one = life(chunk=chunk)
        one.submit(Request([20] * 5, max_tokens=6))
        one.submit(Request([21, *[PLACE] * 13, 22], max_tokens=6, images=[image(1, 6, 0), image(7, 7, 1)]))
        one.submit(Request([23, *[PLACE] * 2, 24], max_tokens=6, images=[image(1, 2, 2)]))
        one.submit(Request([25, *[PLACE] * 2, 24], max_tokens=6))
        one.run()
        one.check()
        assert any(name == "prefill_images" for name, *_ in one.device.shapes)

    def test_an_engine_for_text_refuses_them(self):
        one = life()
        text = Engine(one.device, {}, one.allowed, one.engine.limits)
        before = len(one.device.shapes)
        text.warm()
        assert len(one.device.shapes) == before
        with pytest.raises(RequestError, match="1 images; this engine was built for text only"):
            text.submit(Request([PLACE, 9], images=[image(0, 1, 0)]))


class TestPrefix:
    def test_a_second_prompt_starts_where_the_first_left_off(self):  # PF-36: A, B, A; PF-38
        one = life()
        a, b = ODD[:11], PHRASES[0][:11]
        cached = []
        for prompt in (a, b, a, [*a[:9], 50, 51], b):
            number = one.submit(Request(prompt, max_tokens=3))
            one.run()
            cached.append(one.engine.cached_tokens(number))
        assert cached == [0, 0, 8, 8, 8]
        one.check()

    def test_requests_that_come_together_run_their_common_start_once(self):  # PF-35
        one = life()
        numbers = [one.submit(Request(ODD[:14], max_tokens=6, temperature=1.0, seed=seed)) for seed in range(4)]
        one.run()
        assert [one.engine.cached_tokens(number) for number in numbers] == [0, 12, 12, 12]
        assert len({tuple(drawn(one, number)) for number in numbers}) == 4
        one.check()

    def test_the_same_image_is_found_and_another_is_not(self):  # PF-36 with images at equal ids
        one = life(chunk=3)
        ids = [20, 21, *[PLACE] * 9, 22]
        cached = []
        for name, asked in ((0, ids), (1, ids), (0, ids), (1, [*ids[:-1], 23]), (0, [*ids[:2], *ids])):
            start = 2 if len(asked) == len(ids) else 4
            number = one.submit(Request(asked, max_tokens=3, images=[image(start, 9, name)]))
            one.run()
            cached.append(one.engine.cached_tokens(number))
        number = one.submit(Request(ids, max_tokens=3))  # the same ids and no image
        one.run()
        assert [*cached, one.engine.cached_tokens(number)] == [0, 0, 8, 8, 0, 0]  # red when only ids make a prefix
        one.check()

    def test_a_prompt_waits_for_one_that_runs_the_same_image_only(self):
        one = life(chunk=4)
        asked = [
            Request([*[PLACE] * 9, end], max_tokens=1, images=[image(0, 9, name)])
            for name, end in ((0, 20), (1, 21), (0, 22))
        ]
        numbers = [one.submit(request) for request in asked]
        one.turn()
        # red when the second waits for what will be of no use to it, or the third does not
        assert [sequence.number for sequence in one.engine._scheduler.queue] == numbers[2:]
        one.run()
        assert [one.engine.cached_tokens(number) for number in numbers] == [0, 0, 8]
        one.check()

    def test_prompts_that_part_leave_a_checkpoint_there(self):
        one = life(spacing=CAPACITY)
        prompts = [[*ODD[:12], *tail] for tail in ([40, 41, 42], [50, 51, 52], [60, 61, 62])]
        cached = []
        for prompt in prompts:
            number = one.submit(Request(prompt, max_tokens=1))
            one.run()
            cached.append(one.engine.cached_tokens(number))
        assert cached == [0, 12, 12]  # the first has its last page end there
        for prompt, expected in (([*ODD[:8], 40], 0), ([*ODD[:8], 50], 8)):  # red without the one at the parting
            number = one.submit(Request(prompt, max_tokens=1))
            one.run()
            assert one.engine.cached_tokens(number) == expected
        one.check()

    def test_what_is_not_finite_is_not_kept(self):  # PF-39, PF-55
        one = life()
        bad, good = one.submit(Request([*ODD[:5], NAN, *ODD[:5]])), one.submit(Request(PHRASES[1][:9], max_tokens=5))
        one.run()
        assert [event.finish for event in one.events[bad]] == ["error"]
        assert one.engine.stats().pages_kept == 2  # the good one's
        again = one.submit(Request(ODD[:9], max_tokens=2))
        one.run()
        assert (one.engine.cached_tokens(again), drawn(one, good) != []) == (0, True)
        one.check()

    def test_a_long_prompt_leaves_its_start_while_it_runs(self):
        one = life(chunk=4)
        long, other = one.submit(Request(ODD[:22])), one.submit(Request([*ODD[:9], 40], max_tokens=2))
        for _ in range(4):
            one.turn()
        assert drawn(one, other) and not drawn(one, long)  # red when a start is told of at the end of its prompt only
        one.cancel(long)
        again = one.submit(Request(ODD[:22], max_tokens=2))
        one.run()
        assert [one.engine.cached_tokens(number) for number in (other, again)] == [8, 8]
        one.check()

    def test_without_checkpoints_nothing_is_kept(self):
        one = life(checkpoints=0)
        for _ in range(2):
            number = one.submit(Request(ODD[:11], max_tokens=2))
            one.run()
            assert one.engine.cached_tokens(number) == 0
        assert one.engine.stats().pages_kept == 0
        one.check()

    def test_kept_pages_are_given_up_for_new_requests(self):
        one = life(pages=8, slots=1)
        for start in range(3):
            one.submit(Request(PHRASES[start][:13], max_tokens=8))
        one.run()
        assert one.engine.stats().preemptions == 0  # red when what is kept counts as used
        one.check()


class TestPagesRunOut:
    def test_the_newest_goes_back_and_draws_the_same(self):
        one = life(pages=8, slots=3)
        numbers = [one.submit(Request([20 + i], max_tokens=20, temperature=0.5, seed=i)) for i in range(3)]
        ends = []
        while not one.engine.idle:
            for event in one.engine.turn():
                one.events[event.request].append(event)
                ends += [event.request] if event.finish else []
            one.watch()
        assert one.engine.stats().preemptions > 0
        assert ends == numbers  # red when an older one goes back
        one.check()

    def test_penalties_and_grammars_go_on_where_they_were(self):
        one = life(pages=6, slots=2)
        one.submit(Request([20], max_tokens=20))
        one.submit(Request([21], max_tokens=20, frequency_penalty=0.5, repetition_penalty=1.2))
        one.submit(Request([22], max_tokens=20, grammar=Parity(20)))
        one.run()
        assert one.engine.stats().preemptions > 0
        one.check()

    def test_one_request_may_fill_a_whole_sequence(self):
        one = life(pages=CAPACITY // PAGE)
        for prompt in ([20], ODD[: CAPACITY - 1]):
            number = one.submit(Request(prompt, max_tokens=99))
            one.run()
            assert len(drawn(one, number)) == CAPACITY + 1 - len(prompt)
        one.check()


class TestPrograms:
    @pytest.mark.parametrize(
        ("asked", "kinds"),
        [
            ([{}, {}], {"greedy"}),
            ([{}, {"temperature": 1.0}], {"random"}),
            ([{"logprobs": 1}, {"temperature": 1.0}], {"full"}),
        ],
    )
    def test_the_least_that_serves_all_runs(self, asked, kinds):
        one = life(chunk=64)
        one.device.shapes.clear()
        for fields in asked:
            one.submit(Request([20], max_tokens=4, **fields))
        one.run()
        assert {shape[0] for shape in one.device.shapes} & {"greedy", "random", "full"} == kinds

    def test_alternatives_come_with_the_ids_of_those_who_asked(self):
        one = life()
        asked, other = one.submit(Request([20], max_tokens=4, logprobs=3)), one.submit(Request([21], max_tokens=4))
        one.run()
        for event in one.events[asked]:
            assert event.top == tuple((event.token + i, -float(event.token + i)) for i in range(3))
        assert all(event.top == () for event in one.events[other])

    def test_a_grammar_is_asked_before_every_id_and_ends_its_answer(self):
        one = life()
        held = one.submit(Request([20], max_tokens=9, grammar=Parity(5)))
        full = one.submit(Request([21], max_tokens=9, grammar=Parity(9)))
        free = one.submit(Request([22], max_tokens=9, temperature=1.0))
        one.run()
        assert [token % 2 for token in drawn(one, held)] == [0, 1, 0, 1, 0]
        assert [one.events[number][-1].finish for number in (held, full, free)] == ["stop", "stop", "length"]
        one.check()


class TestGroups:
    def test_requests_spread_over_the_groups(self):
        one = life(groups=2)
        for i in range(4):
            one.submit(Request([20 + i], max_tokens=4))
        one.turn()
        assert sorted(s.group for s in one.engine._scheduler.running) == [0, 0, 1, 1]
        one.run()
        one.check()

    def test_a_prompt_goes_where_its_start_is_kept(self):
        one = life(groups=2)
        one.submit(Request(ODD[:11], max_tokens=2))
        one.run()
        for _ in range(2):  # both, though the other group has more room
            one.submit(Request([*ODD[:11], 20], max_tokens=4))
        one.turn()
        assert {s.group for s in one.engine._scheduler.running} == {0}
        one.run()
        assert one.engine.stats().hit_tokens == 16
        one.check()


def test_counts_add_up():
    one = life()
    for prompt in (ODD[:11], [*ODD[:9], 20], [7]):
        one.submit(Request(prompt, max_tokens=3))
    assert (one.engine.stats().queued, one.engine.idle) == (3, False)
    one.turn()
    stats = one.engine.stats()
    assert (stats.queued, stats.running) == (1, 2)  # the second waits for the first one's start
    one.run()
    stats = one.engine.stats()
    assert (stats.prompt_tokens, stats.hit_tokens, stats.drawn_tokens) == (22, 8, 9)
    assert (stats.slots, stats.pages, stats.checkpoints) == (4, 40, 8)
    assert stats.turns > 0
