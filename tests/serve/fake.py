"""An engine without a model, for tests of the protocol: it answers with what a test has written."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kimi_jax.engine.engine import EngineFull, EngineStats
from kimi_jax.engine.request import Event, Request, check

Answer = Sequence[int] | Callable[[Request], Sequence[int]]

LOGPROB = -0.5


class FakeEngine:
    """Draws a written answer, ``block`` ids a turn for each of ``slots`` requests, and checks that one thread calls it.

    Attributes:
      answer: ids of every answer, or a function of the request; after them come zeros until max_tokens.
      seen: all requests submitted.
      cancelled: numbers that were cancelled while they ran or waited.
      embed: width of image rows; None refuses images.
      hold: while set, turns draw nothing.
      fail: an exception for the next turn to raise.
      pause: seconds that a turn takes.
      broken: numbers whose next id has no finite scores.
    """

    def __init__(
        self, vocab: int, answer: Answer = (), slots: int = 4, queue: int = 8, block: int = 4, capacity: int = 4096
    ):
        self.vocab, self.answer, self.slots, self.queue, self.block, self.capacity = (
            vocab, answer, slots, queue, block, capacity,
        )  # fmt: skip
        self.embed: int | None = None
        self.seen: list[Request] = []
        self.cancelled: list[int] = []
        self.ended: list[int] = []
        self.hold = threading.Event()
        self.fail: BaseException | None = None
        self.pause = 0.0
        self.broken: set[int] = set()
        self.warmed = False
        self.turns = 0
        self.warm_gate: threading.Event | None = None
        self._waiting: deque[int] = deque()
        self._running: dict[int, list[int]] = {}
        self._thread: int | None = None

    def _same_thread(self) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        assert here == self._thread, "the engine was called from two threads"

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running)

    def warm(self) -> None:
        self._same_thread()
        if self.warm_gate is not None:
            assert self.warm_gate.wait(30)
        self.warmed = True

    def submit(self, request: Request) -> int:
        self._same_thread()
        check(request, self.vocab, self.capacity, self.embed)
        if len(self._waiting) >= self.queue:
            raise EngineFull(len(self._waiting), 2.5)
        self.seen.append(request)
        number = 1000 + len(self.seen)
        self._waiting.append(number)
        return number

    def cancel(self, number: int) -> None:
        self._same_thread()
        if number in self._waiting:
            self._waiting.remove(number)
            self.cancelled.append(number)
        elif self._running.pop(number, None) is not None:
            self.cancelled.append(number)

    def turn(self) -> list[Event]:
        self._same_thread()
        if self.fail is not None:
            raise self.fail
        if self.hold.is_set():
            threading.Event().wait(0.002)
            return []
        time.sleep(self.pause)
        self.turns += 1
        while self._waiting and len(self._running) < self.slots:
            number = self._waiting.popleft()
            request = self.seen[number - 1001]
            answer = self.answer(request) if callable(self.answer) else self.answer
            self._running[number] = list(answer)
        events = []
        for number in list(self._running):
            events += self._draw(number)
        return events

    def _draw(self, number: int) -> list[Event]:
        request, left = self.seen[number - 1001], self._running[number]
        drawn = getattr(self, "_drawn", {})
        self._drawn = drawn
        events = []
        for _ in range(self.block):
            if number in self.broken:
                del self._running[number]
                return [*events, Event(number, None, 0.0, "error")]
            token = left.pop(0) if left else 0
            drawn[number] = drawn.get(number, 0) + 1
            finish = "stop" if token in request.stops else "length" if drawn[number] >= request.max_tokens else None
            top = tuple(((token + place) % self.vocab, LOGPROB - place) for place in range(request.logprobs))
            if len(top) > 1:
                top = (*top[:-1], (top[-1][0], -math.inf))
            events.append(Event(number, token, LOGPROB, finish, top))
            if finish:
                del self._running[number]
                self.ended.append(number)
                break
        return events

    def cached_tokens(self, number: int) -> int:
        self._same_thread()
        return 7

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self._waiting), len(self._running), self.slots, 64, len(self._running), 0, 8, 0, 0, 0, 0, 0, 0
        )
