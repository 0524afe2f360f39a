"""Crowds of real clients, some of which leave early or ask nonsense: nothing is lost, no slot stays taken, memory stays flat."""

import asyncio
import json
import random
import socket
from collections import Counter

import httpx
import pytest

from kimi_jax.serve.limits import Limits
from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving, wait_for
from tests.serve.model import CAPACITY, reply, served
from tests.serve.test_chat import END, SAID, THOUGHT


def request_of(dice):
    """A body, and how it is meant to end."""
    body = {
        "messages": [{"role": "user", "content": "word " * dice.randrange(1, 40)}],
        "max_tokens": dice.randrange(1, 60),
    }
    body |= {"temperature": dice.choice([0, 1]), "n": dice.choice([1, 1, 1, 3]), "seed": dice.randrange(1000)}
    fate = dice.choices(["whole", "stream", "leave", "wrong"], [4, 4, 2, 2])[0]
    if fate == "wrong":
        body |= dice.choice([{"temperature": 9}, {"messages": "x"}, {"model": "none"}, {"max_tokens": -1}, {"what": 1}])
    return body | ({"stream": True} if fate in ("stream", "leave") else {}), fate


def ended(events, answers):
    """Whether a stream came to its end: one finish for each answer, then [DONE]."""
    assert events[-1] == "[DONE]", events[-3:]
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    return sorted(ends) == list(range(answers))


async def one(client, dice, tally):
    body, fate = request_of(dice)
    while True:
        async with client.stream("POST", "/chat/completions", json=body) as got:
            if got.status_code == 429:
                tally["waited"] += 1
                await got.aread()
                assert int(got.headers["retry-after"]) >= 1
                await asyncio.sleep(dice.random() * 0.2)  # sooner than it was told to: the worst of clients
                continue
            if fate == "wrong":
                assert 400 <= got.status_code < 500
                assert json.loads(await got.aread())["error"]["message"]
            elif fate == "whole":
                answer = json.loads(await got.aread())
                assert got.status_code == 200, answer
                assert [choice["index"] for choice in answer["choices"]] == list(range(body["n"]))
                assert answer["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"]
            else:
                assert got.status_code == 200
                events, stop = [], dice.randrange(1, 6)
                async for line in got.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                    if fate == "leave" and len(events) >= stop:
                        break
                assert fate == "leave" or ended(events, body["n"])
        tally[fate] += 1
        return


async def crowd(url, clients, requests, seed):
    tally: Counter = Counter()
    dice = random.Random(seed)
    left = iter([random.Random(dice.random()) for _ in range(requests)])

    async def visitor(client):
        for own in left:
            await asyncio.wait_for(one(client, own, tally), 300)

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
        await asyncio.gather(*(visitor(client) for _ in range(clients)))
    return tally


def check_nothing_is_left(running, url):
    pump = running.server.pump
    wait_for(lambda: pump.stats.running == pump.stats.queued == 0)
    assert not pump._flows and not pump._new  # red when the pump remembers who has gone
    wait_for(lambda: running.server.app._door._inside == 0, 5)
    assert pump.stats.pages_used == 0
    with httpx.Client(base_url=url) as client:
        text = client.get(url.removesuffix("/v1") + "/metrics").text
    assert 'status="500"' not in text


def run_crowd(running, clients, requests, seed):
    tally = asyncio.run(crowd(running.url, clients, requests, seed))
    assert sum(tally[fate] for fate in ("whole", "stream", "leave", "wrong")) == requests  # nothing lost
    assert min(tally[fate] for fate in ("whole", "stream", "leave", "wrong")) > 0
    check_nothing_is_left(running, running.url)
    return tally


def test_a_small_crowd():
    engine = FakeEngine(served().vocab, reply(THOUGHT + SAID + END), capacity=CAPACITY, slots=4, queue=6)
    engine.pause = 0.001
    with serving(engine) as running:
        tally = run_crowd(running, clients=16, requests=120, seed=1)
    assert tally["waited"]  # red when the queue has no end
    assert engine.cancelled


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux drops connections that nobody reads")
def test_a_client_that_reads_nothing_leaves_no_connection():
    engine = FakeEngine(served().vocab, lambda request: [5] * 900, capacity=CAPACITY, queue=300)
    with serving(engine, Limits(write_seconds=0.2)) as loopback, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", int(loopback.url.removesuffix("/v1").rpartition(":")[2])))
        asked = {"prompt": ["x"] * 16, "n": 16, "stream": True, "max_tokens": 900, "logprobs": 20, "ignore_eos": True}
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: engine.seen)
        wait_for(lambda: engine.idle, 20)
        # red when only the answer ends: its connection would stay, and hold up the end of the server
        wait_for(lambda: not loopback.server.server_state.connections, 20)
