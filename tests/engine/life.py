"""An engine on the fake device, watched: after every call what is freed is poisoned, and all that is held must add up."""

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kimi_jax.engine.engine import Engine
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.request import Event, Request
from tests.engine import fake_device as fake
from tests.engine.fake_device import POISON, VOCAB, FakeDevice

CAPACITY, BLOCK, PAGE = 24, 4, 4


@dataclass
class Parity:
    """A grammar: odd and even ids take turns, ``length`` of them."""

    length: int
    taken: int = 0

    @property
    def finished(self) -> bool:
        return self.taken == self.length

    def mask(self) -> np.ndarray:
        return fake.packed(np.arange(VOCAB) % 2 == self.taken % 2)

    def accept(self, token: int) -> None:
        assert token % 2 == self.taken % 2, "an id that the mask did not allow"
        assert not self.finished
        self.taken += 1


class Life:
    """Runs requests and gathers what they draw."""

    def __init__(self, limits: EngineLimits, groups: int = 1, block: int = BLOCK, drafts: int = 0) -> None:
        sizes = (limits.slots, limits.pages, limits.page, limits.checkpoints)
        self.device = FakeDevice(CAPACITY, block, *sizes, groups, drafts=drafts)
        self.allowed = ~np.isin(np.arange(VOCAB), [11, fake.NAN])
        self.engine = Engine(self.device, {}, self.allowed, limits, images=True)
        self.engine.warm()
        self.compiled = set(self.device.shapes)
        self.asked: dict[int, Request] = {}
        self.events: dict[int, list[Event]] = {}
        self.cancelled: set[int] = set()
        self.watch()

    def submit(self, request: Request) -> int:
        grammar = replace(request.grammar) if request.grammar else None  # its own: it remembers
        number = self.engine.submit(replace(request, grammar=grammar))
        self.asked[number], self.events[number] = request, []
        return number

    def turn(self) -> None:
        for event in self.engine.turn():
            assert event.request not in self.cancelled, "an event after cancelling"
            told = self.events[event.request]
            assert not told or told[-1].finish is None, "an event after the last"
            told.append(event)
        self.watch()

    def cancel(self, number: int) -> None:
        if not (self.events[number] and self.events[number][-1].finish):
            self.cancelled.add(number)
        self.engine.cancel(number)
        self.watch()

    def run(self) -> None:
        """To the end of every request."""
        for _ in range(2000):
            if self.engine.idle:
                return
            self.turn()
        raise AssertionError("the engine does not come to an end")

    # ---- what must hold at any time

    def watch(self) -> None:
        """Every page, slot and checkpoint has exactly the users that are there; what has none is poisoned."""
        scheduler, memory = self.engine._scheduler, self.device_memory
        for index, group in enumerate(scheduler.groups):
            running = [s for s in scheduler.running if s.group == index]
            nodes = list(self._nodes(group.tree._root, []))
            pages = Counter(page for s in running for page in s.pages) + Counter(node.page for node, _ in nodes)
            held = Counter(c for s in running for c in s.saved.values())
            held += Counter(node.checkpoint for node, _ in nodes if node.checkpoint is not None)
            slots = Counter(s.slot for s in running)
            for pool, users, where in (
                (group.pages, pages, memory.pages),
                (group.checkpoints, held, memory.kept),
                (group.slots, slots, memory.states),
            ):
                assert [pool.users(place) for place in range(pool.size)] == [users[p] for p in range(pool.size)]
                where[index, [place for place in range(pool.size) if not users[place]]] = POISON
            assert all(n == 1 for n in (*held.values(), *slots.values())), "a slot or a checkpoint of two"
            for (
                node,
                tokens,
            ) in nodes:  # red when anything is written to a kept page, or a checkpoint is off its boundary
                assert memory.pages[index, node.page].tolist() == tokens[-PAGE:]
                assert node.checkpoint is None or memory.kept[index, node.checkpoint] == fake.fold(tokens)
                assert node.children or node.checkpoint is not None, "a page that no checkpoint reaches"
                assert fake.NAN not in tokens, "a page that was computed from what is not finite"

    @property
    def device_memory(self) -> fake.Memory:
        return self.engine._cache

    def _nodes(self, node, before):
        for child in node.children.values():
            ids, marks = child.key[: 4 * PAGE], child.key[4 * PAGE :]
            tokens = before + np.frombuffer(ids, np.int32).tolist()
            while marks:
                start, length, size = struct.unpack_from("<3q", marks)
                (name,), marks = marks[24 : 24 + size], marks[24 + size :]
                tokens = fake.seen(tokens, [fake.image(start, length, name)])[: len(before) + PAGE]
            yield child, tokens
            yield from self._nodes(child, tokens)

    def check(self) -> None:
        """After the end: the ids of each request are those it draws alone, and nothing is held."""
        for number, request in self.asked.items():
            told = self.events[number]
            drawn = [event.token for event in told if event.token is not None]
            grammar = replace(request.grammar) if request.grammar else None
            wanted, finish = fake.alone(replace(request, grammar=grammar), CAPACITY, self.allowed, self.device.drafts)
            if number in self.cancelled:
                assert drawn == wanted[: len(drawn)]
                continue
            assert (number, drawn, told[-1].finish) == (number, wanted, finish)
            assert [event.logprob for event in told if event.token is not None] == [-float(t) for t in wanted]
            assert all(len(event.top) == (0 if event.token is None else request.logprobs) for event in told)
        assert self.device.shapes == self.compiled, "a call of a new shape"
        stats = self.engine.stats()
        assert (stats.queued, stats.running, stats.pages_used) == (0, 0, 0)
        self.engine.forget()
        stats = self.engine.stats()
        assert (stats.pages_kept, stats.checkpoints_used) == (0, 0)
        assert all(group.pages.free == group.pages.size for group in self.engine._scheduler.groups)


# ---- what hypothesis draws


@st.composite
def limits(draw, groups: int) -> EngineLimits:
    """Tight sizes: few pages, so that requests are taken back and prefixes given up."""
    return EngineLimits(
        slots=groups * draw(st.integers(1, 4)),
        pages=groups * draw(st.integers(CAPACITY // PAGE, 11)),
        checkpoints=groups * draw(st.integers(0, 4)),
        queue=64,
        page=PAGE,
        chunk=draw(st.sampled_from([1, 3, 16, 40])),
        spacing=PAGE * draw(st.integers(1, 4)),
    )


PHRASES = [np.random.default_rng(seed).integers(12, VOCAB, CAPACITY).tolist() for seed in range(3)]


@st.composite
def requests(draw) -> Request:
    """Prompts that share starts, and every kind of sampling."""
    shared = draw(st.sampled_from(PHRASES))[: draw(st.integers(0, CAPACITY - 4))]
    places, images = draw(st.sampled_from([(), ((3, 6),), ((4, 4),), ((1, 2), (3, 7))])), []
    if places and places[-1][0] + places[-1][1] <= len(shared):
        for start, length in places:  # images of two names at equal ids, and ids of images without any
            shared[start : start + length] = [fake.PLACE] * length
        images = [fake.image(*place, draw(st.integers(0, 1))) for place in places] if draw(st.booleans()) else []
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    plain = {
        "max_tokens": draw(st.sampled_from([1, 2, 5, 9, 20, 30])),
        "stops": draw(st.sampled_from([(), (5, 20, 30)])),
    }
    warm = {"temperature": 0.7, "seed": draw(st.integers(0, 3)), "top_p": 0.9}
    extras = {"frequency_penalty": 0.5, "bias": {7: 2.0, 3: -1.0}, "min_p": 0.1, "logprobs": 2}
    kinds = [{}, warm, extras, {"repetition_penalty": 1.3, **warm}, {"grammar": Parity(draw(st.integers(1, 9)))}]
    return Request([*shared, *own], **plain, images=images, **draw(st.sampled_from(kinds)))


def steps() -> st.SearchStrategy[list]:
    """A life: requests come, turns go by, some are cancelled."""
    submit, turn = st.tuples(st.just("submit"), requests()), st.tuples(st.just("turn"), st.integers(1, 6))
    cancel = st.tuples(st.just("cancel"), st.integers(0, 11))
    first = st.lists(submit, min_size=1, max_size=6)
    then = st.lists(st.one_of(submit, turn, cancel), max_size=10)
    return st.tuples(first, then).map(lambda parts: [*parts[0], *parts[1]])


def live(life: Life, given: Iterable[tuple]) -> None:
    """Plays the steps and runs to the end."""
    for what, value in given:
        if what == "submit":
            life.submit(value)
        elif what == "turn":
            for _ in range(value):
                life.turn()
        elif value in life.asked:
            life.cancel(value)
    life.run()
