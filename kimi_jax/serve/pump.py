"""The one thread that runs the engine, and the way of its events to the event loop.

The engine knows no threads: all its methods are called here, between two turns. The event loop's side sends commands and takes
events; one call into the loop carries all events of a turn.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kimi_jax.engine.engine import EngineStats
from kimi_jax.engine.request import Event, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

Item = tuple[int, Event]
"""Place of a request among those submitted together, and its news."""


class Engine(Protocol):
    """What is used of an engine."""

    @property
    def idle(self) -> bool: ...
    def submit(self, request: Request) -> int: ...
    def cancel(self, number: int) -> None: ...
    def turn(self) -> list[Event]: ...
    def stats(self) -> EngineStats: ...
    def cached_tokens(self, number: int) -> int: ...
    def warm(self) -> None: ...


class EngineStopped(Exception):
    """The engine's thread has ended; nothing more will come."""


class Flow:
    """The news of some requests that were submitted together, for one reader in the event loop.

    Attributes:
      cached: prompt tokens of each request that came from the prefix cache, as far as known.
    """

    def __init__(self, pump: "Pump", count: int) -> None:
        self._pump = pump
        self._news: asyncio.Queue[list[Item] | None] = asyncio.Queue()
        self.cached = [0] * count
        self.numbers: list[int] = []  # of the engine; the pump's thread writes them before the reader is told

    async def next(self) -> list[Item]:
        """What one or more turns have drawn. Raises EngineStopped."""
        news = await self._news.get()
        while news is not None and not self._news.empty():  # a reader that fell behind takes all at once
            more = self._news.get_nowait()
            news = None if more is None else news + more
        if news is None:
            raise EngineStopped("the engine has stopped")
        return news

    def cancel(self, place: int) -> None:
        """Ends one request; some of its news may still come."""
        self._pump.cancel([self.numbers[place]])

    def close(self) -> None:
        """Ends all requests that have not ended."""
        self._pump.cancel(self.numbers)

    def put(self, news: list[Item] | None, cached: Sequence[tuple[int, int]] = ()) -> None:
        """For the pump, in the event loop's thread."""
        for place, tokens in cached:
            self.cached[place] = tokens
        self._news.put_nowait(news)


@dataclass
class _Job(Generic[T]):
    steps: Iterator[T]
    done: "asyncio.Future[list[T]]"
    found: list[T] = field(default_factory=list)


class Pump:
    """Runs an engine in a thread of its own.

    Args:
      engine: nobody else may touch it.
      on_failure: called in the event loop's thread when a turn has failed. The engine's state is then unknown: nothing goes on.
      warm: called in the engine's thread after the engine is warm: what else must be compiled.
    """

    def __init__(
        self, engine: Engine, on_failure: Callable[[], None] = lambda: None, warm: Callable[[], None] = lambda: None
    ) -> None:
        self._engine, self._on_failure, self._warm = engine, on_failure, warm
        self._jobs: deque[_Job[Any]] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._flows: dict[int, tuple[Flow, int]] = {}  # by the engine's number: who reads it, and as which place
        self._new: set[int] = set()  # numbers without an event so far
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats: EngineStats | None = None  # of the last turn; replaced whole
        self.ready, self._cold = False, True
        self.failure: BaseException | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        """Starts the thread, which warms the engine up first. To be called in the event loop that reads the flows."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> Flow:
        """Puts requests into the engine's queue, all or none.

        Raises:
          RequestError, EngineFull: as the engine does.
          EngineStopped: the thread has ended.
        """
        assert self._loop is not None
        taken: asyncio.Future[None] = self._loop.create_future()
        flow = Flow(self, len(requests))
        if not self._command(lambda: self._submit(requests, flow, taken)):
            raise EngineStopped("the engine has stopped")
        try:
            await taken
        except BaseException:
            self._command(lambda: self._cancel(flow.numbers))  # whoever asked has gone: whatever was taken ends
            raise
        return flow

    async def work(self, steps: Iterator[T]) -> list[T]:
        """Takes the steps of other work on the device, one between two turns. Raises EngineStopped, and what a step raises."""
        assert self._loop is not None
        job = _Job(steps, self._loop.create_future())
        if not self._command(lambda: self._jobs.append(job)):
            raise EngineStopped("the engine has stopped")
        return await job.done

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends requests; those that have ended are left out."""
        self._command(lambda: self._cancel(numbers))

    @property
    def compiling(self) -> bool:
        """Whether the thread still warms up. Nothing can interrupt that, and nobody has to wait for it: it is a daemon."""
        return self._thread.is_alive() and self._cold

    async def stop(self) -> None:
        """Ends the thread after its turn; requests that have not ended get EngineStopped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if not self.compiling:
            await asyncio.to_thread(self._thread.join)

    def _command(self, command: Callable[[], None]) -> bool:
        """Hands a command to the thread; False when it takes none any more."""
        with self._wake:
            if self._stopping or not self._thread.is_alive():
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    # The rest runs in the thread.

    def _run(self) -> None:
        try:
            self._engine.warm()
            self._warm()
            self._cold = False
            self.stats, self.ready = self._engine.stats(), True
            while self._work():
                self._tell(self._engine.turn())
                self._step()
                self.stats = self._engine.stats()
        except BaseException as error:
            log.exception("the engine failed; nothing more is answered")
            self.failure = error
            self._call(self._on_failure)
        finally:
            self.ready = False
            self._end()

    def _work(self) -> bool:
        """Waits for something to do and carries commands out; False when the thread shall end."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self._jobs) and self._engine.idle:
                    self._wake.wait()
                if self._stopping:
                    return False
                waiting = len(self._commands)
            for _ in range(waiting):  # one by one: those behind one that fails are ended with the thread
                self._commands.popleft()()
            if self._jobs or not self._engine.idle:
                return True
            self.stats = self._engine.stats()

    def _submit(self, requests: Sequence[Request], flow: Flow, taken: "asyncio.Future[None]") -> None:
        try:
            if self._stopping:
                raise EngineStopped("the engine has stopped")
            for place, request in enumerate(requests):
                number = self._engine.submit(request)
                flow.numbers.append(number)
                self._flows[number] = (flow, place)
                self._new.add(number)
        except Exception as error:
            self._cancel(flow.numbers)
            refusal = error
            self._call(lambda: taken.done() or taken.set_exception(refusal))
        else:
            self._call(lambda: taken.done() or taken.set_result(None))

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._flows.pop(number, None) is not None:
                self._engine.cancel(number)
                self._new.discard(number)

    def _step(self) -> None:
        """One step of the first of the other jobs; those wait for one another."""
        if not self._jobs:
            return
        job = self._jobs[0]
        if job.done.cancelled():
            self._jobs.popleft()
            return
        try:
            job.found.append(next(job.steps))
        except StopIteration:
            self._jobs.popleft()
            self._call(lambda: job.done.done() or job.done.set_result(job.found))
        except Exception as error:
            failure = error
            self._jobs.popleft()
            self._call(lambda: job.done.done() or job.done.set_exception(failure))

    def _tell(self, events: Sequence[Event]) -> None:
        """Carries the events of a turn to their readers, in one call into the event loop."""
        news: dict[Flow, list[Item]] = {}
        cached: dict[Flow, list[tuple[int, int]]] = {}
        for event in events:
            if event.request not in self._flows:
                continue
            flow, place = self._flows[event.request]
            news.setdefault(flow, []).append((place, event))
            if event.request in self._new:
                self._new.discard(event.request)
                cached.setdefault(flow, []).append((place, self._engine.cached_tokens(event.request)))
            if event.finish is not None:
                del self._flows[event.request]
        if news:
            self._call(lambda: [flow.put(items, cached.get(flow, ())) for flow, items in news.items()])

    def _end(self) -> None:
        with self._wake:
            self._stopping = True
            commands = list(self._commands)
            self._commands.clear()
        readers = {flow for flow, _ in self._flows.values()}
        self._flows.clear()
        self._call(lambda: [flow.put(None) for flow in readers])
        for command in commands:  # a submission that came too late must not wait for ever
            command()
        jobs, stopped = list(self._jobs), EngineStopped("the engine has stopped")
        self._call(lambda: [job.done.done() or job.done.set_exception(stopped) for job in jobs])

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)
