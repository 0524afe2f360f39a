"""The engine's thread: commands in order, events to whoever asked, and what happens when either side ends."""

import asyncio
import threading

import pytest

from kimi_jax.engine.engine import EngineFull
from kimi_jax.engine.request import Request, RequestError
from kimi_jax.serve.pump import EngineStopped, Pump
from tests.serve.client import until
from tests.serve.fake import FakeEngine


def run(engine, scenario):
    async def all_of_it():
        failed = []
        pump = Pump(engine, lambda: failed.append(True))
        pump.start()
        await until(lambda: pump.ready or pump.failure)
        try:
            await scenario(pump)
        finally:
            await pump.stop()
        return failed

    return asyncio.run(all_of_it())


async def read(flow, count):
    """All events of a flow by place until every request has ended."""
    events = [[] for _ in range(count)]
    ended = 0
    while ended < count:
        for place, event in await flow.next():
            events[place].append(event)
            ended += event.finish is not None
    return events


def test_events_go_to_whoever_asked():
    engine = FakeEngine(100, lambda request: [request.ids[0]] * 9, slots=3)

    async def one(pump, first):
        flow = await pump.submit([Request([first], max_tokens=9), Request([first + 1], max_tokens=5)])
        a, b = await read(flow, 2)
        assert [event.token for event in a] == [first] * 9
        assert [event.token for event in b] == [first + 1] * 5
        assert flow.cached == [7, 7]

    async def scenario(pump):
        await asyncio.gather(*(one(pump, first) for first in range(0, 8, 2)))

    run(engine, scenario)  # the fake asserts that one thread calls it
    assert len(engine.ended) == 8


def test_the_event_loop_is_free_while_the_engine_works():
    engine = FakeEngine(100, [1], slots=1)
    engine.pause = 0.3

    async def scenario(pump):
        flow = await pump.submit([Request([1], max_tokens=4)])
        ticks = 0
        reading = asyncio.create_task(read(flow, 1))
        while not reading.done():
            ticks += 1
            await asyncio.sleep(0.005)
        assert ticks > 10  # red when turn() runs in the loop's thread

    run(engine, scenario)


def test_all_or_none():
    engine = FakeEngine(100, [1], slots=1, queue=3)
    engine.hold.set()

    async def scenario(pump):
        with pytest.raises(EngineFull):
            await pump.submit([Request([1])] * 4)
        assert engine.cancelled == [1001, 1002, 1003]  # red when those that were taken stay
        with pytest.raises(RequestError):
            await pump.submit([Request([1]), Request([1000])])
        assert engine.cancelled[3:] == [1004] and engine.idle
        assert pump.alive

    run(engine, scenario)


def test_cancel():
    engine = FakeEngine(100, slots=1)

    async def scenario(pump):
        engine.pause = 0.002
        flow = await pump.submit([Request([1], max_tokens=10**6), Request([2], max_tokens=10**6)])
        await flow.next()
        flow.cancel(1)
        await until(lambda: engine.cancelled == [1002])
        flow.close()
        flow.close()
        await until(lambda: engine.idle)
        assert engine.cancelled == [1002, 1001]  # red when close cancels again what has ended

    run(engine, scenario)


def test_whoever_leaves_while_submitting_leaves_nothing_behind():
    engine = FakeEngine(100, slots=1)

    async def scenario(pump):
        engine.pause = 0.05
        busy = await pump.submit([Request([1], max_tokens=10**6)])
        leaving = asyncio.create_task(pump.submit([Request([2], max_tokens=10**6)]))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        busy.close()
        await until(lambda: engine.idle)  # red (never) when the second request runs on

    run(engine, scenario)


def test_a_failing_turn_ends_everything(caplog):
    engine = FakeEngine(100, slots=1)

    async def scenario(pump):
        engine.pause = 0.002
        flow = await pump.submit([Request([1], max_tokens=10**6)])
        engine.fail = RuntimeError("out of memory")
        with pytest.raises(EngineStopped):
            while True:
                await asyncio.wait_for(flow.next(), 10)  # red (timeout) when readers are not told
        assert not pump.alive and not pump.ready
        with pytest.raises(EngineStopped):
            await pump.submit([Request([1])])
        flow.close()  # nothing to do any more

    assert run(engine, scenario) == [True]
    assert "out of memory" in caplog.text


def test_a_failing_command_ends_those_behind_it(caplog):
    engine = FakeEngine(100, [1], slots=1)

    def broken(number):
        raise RuntimeError("lost the device")

    async def scenario(pump):
        flow = await pump.submit([Request([1], max_tokens=50)])
        engine.cancel, engine.pause = broken, 0.2  # the pump is in a turn while both commands come
        await asyncio.sleep(0.05)
        flow.close()
        with pytest.raises(EngineStopped):  # red, by its time, when the commands are taken out of the queue together
            await asyncio.wait_for(pump.submit([Request([2])]), 5)

    assert run(engine, scenario) == [True]
    assert "lost the device" in caplog.text


def test_stopping_tells_readers():
    engine = FakeEngine(100, slots=1)

    async def scenario(pump):
        engine.hold.set()
        flow = await pump.submit([Request([1])])
        stopping = asyncio.create_task(pump.stop())
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(flow.next(), 10)
        await stopping
        with pytest.raises(EngineStopped):
            await pump.submit([Request([1])])

    assert run(engine, scenario) == []


def test_other_work_goes_between_turns():
    engine = FakeEngine(100, slots=1)
    where = []

    def steps(count, fault=None):
        for number in range(count):
            where.append(threading.get_ident())
            yield number
        if fault:
            raise fault

    async def scenario(pump):
        assert await pump.work(steps(3)) == [0, 1, 2]
        engine.pause = 0.001
        flow = await pump.submit([Request([1], max_tokens=10**6)])
        before = engine.turns
        assert await pump.work(steps(20)) == list(range(20))
        assert engine.turns >= before + 19  # red when a long prompt's scores hold up everybody's answers
        with pytest.raises(ValueError, match="bad"):
            await pump.work(steps(1, ValueError("bad")))
        leaving = asyncio.create_task(pump.work(steps(10**9)))
        await flow.next()
        leaving.cancel()
        assert await pump.work(steps(2)) == [0, 1]  # red (never) when work that nobody waits for goes on
        flow.close()
        assert set(where) == {engine._thread}
        endless = asyncio.create_task(pump.work(steps(10**9)))
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(pump.stop())
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(endless, 10)
        await stopping

    run(engine, scenario)


def test_warm_up_comes_first():
    engine = FakeEngine(100, [1])
    engine.warm_gate = threading.Event()

    async def scenario():
        pump = Pump(engine)
        pump.start()
        assert pump.alive and not pump.ready  # red when the server is ready before it has compiled
        engine.warm_gate.set()
        await until(lambda: pump.ready)
        assert engine.warmed
        await pump.stop()

    asyncio.run(scenario())
