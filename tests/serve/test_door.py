"""Who gets in, how much, and how a server ends: keys, sizes, crowds, disconnects, time."""

import asyncio
import json

import pytest

from kimi_jax.serve.limits import Limits
from tests.serve.client import Call, ask, run, until
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, reply, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "x"}]}


def fake(**options):
    engine = FakeEngine(served().vocab, reply("a b c d"), capacity=CAPACITY, **options)
    engine.pause = 0.001
    return engine


class TestKeys:
    @pytest.mark.parametrize(
        ("given", "status"),
        [
            ("Bearer key-1", 200),
            ("bearer key-2", 200),  # red when only the first key is known
            ("Bearer key-", 401),
            ("Bearer key-11", 401),
            ("Bearer ", 401),
            ("Basic key-1", 401),  # red when the scheme is not looked at
            ("key-1", 401),
            ("Bearer k\xe9y", 401),  # red (500) when a key must be ASCII
            (None, 401),
        ],
    )
    def test_keys(self, given, status):
        headers = {} if given is None else {"authorization": given}
        got = run(fake(), lambda app: ask(app, "/v1/models", headers=headers), keys=("key-1", "key-2"))
        assert got.status == status
        if status == 401:
            assert got.error["code"] == "invalid_api_key"
            assert "key-1" not in got.body.decode()

    def test_all_keys_are_compared(self, monkeypatch):
        import hmac

        compared = []
        monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
        run(
            fake(),
            lambda app: ask(app, "/v1/models", headers={"authorization": "Bearer key-1"}),
            keys=("key-1", "key-2"),
        )
        assert len(compared) == 2  # red when the comparison stops at the first that fits
        assert all(len(a) == len(b) == 32 for a, b in compared)  # red when lengths of keys are told by time

    def test_probes_need_none(self):
        async def scenario(app):
            return [
                (await ask(app, path)).status for path in ("/health", "/ready", "/metrics", "/v1/models", "/tokenize")
            ]

        assert run(fake(), scenario, keys=("k",)) == [200, 200, 200, 401, 401]

    def test_a_stranger_cannot_make_the_server_read(self):
        async def scenario(app):
            call = Call(app, CHAT, b"")
            call._incoming.clear()  # the body never comes
            return await call.done(5)

        assert run(fake(), scenario, keys=("k",)).status == 401  # red (timeout) when the body is read before the key


class TestBodies:
    def test_too_large(self):
        limits = Limits(body_bytes=2000)

        async def scenario(app):
            large = json.dumps({"prompt": "x" * 3000}).encode()
            told = await ask(app, TEXT, large, headers={"content-length": str(len(large))})
            return told, await ask(app, TEXT, large)

        for got in run(fake(), scenario, limits=limits):
            assert got.status == 413 and "2.00 kB" in got.error["message"]

    def test_too_slow(self):
        async def scenario(app):
            call = Call(app, TEXT, b"{")
            call._incoming[0]["more_body"] = True
            return await call.done(10)

        assert run(fake(), scenario, limits=Limits(body_seconds=0.05)).status == 408

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
    def test_only_json(self, kind):
        got = run(fake(), lambda app: ask(app, TEXT, {"prompt": "x"}, headers={"content-type": kind}))
        assert got.status == 415

    def test_json_with_a_charset(self):
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert run(fake(), lambda app: ask(app, TEXT, {"prompt": "x", "max_tokens": 1}, headers=headers)).status == 200


class TestRoutes:
    def test_nothing_there(self):
        async def scenario(app):
            return [
                await ask(app, path)
                for path in ("/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/%00", "/" + "x" * 5000)
            ]

        for got in run(fake(), scenario):
            assert got.status == 404 and "/v1/chat/completions" in got.error["message"]
            assert len(got.body) < 1000

    def test_another_method(self):
        async def scenario(app):
            return await ask(app, CHAT), await ask(app, "/v1/models", {}), await ask(app, CHAT, {}, method="BREW")

        for got, works in zip(run(fake(), scenario), ("POST", "GET", "POST"), strict=True):
            assert got.status == 405 and works in got.headers["allow"] and works in got.error["message"]


class TestCrowds:
    def test_a_full_queue(self):
        engine = fake(slots=1, queue=2)
        engine.hold.set()

        async def scenario(app):
            first = [Call(app, TEXT, {"prompt": "x", "max_tokens": 2}) for _ in range(2)]
            await until(lambda: len(engine.seen) == 2)
            late = await ask(app, TEXT, {"prompt": "x"})
            streamed = await ask(app, TEXT, {"prompt": "x", "stream": True})
            engine.hold.clear()
            return late, streamed, [await call.done() for call in first]

        late, streamed, first = run(engine, scenario)
        for got in (late, streamed):
            assert got.status == 429 and got.headers["retry-after"] == "3"  # 2.5 s, in whole seconds
            assert got.error["type"] == "rate_limit_error"
        assert [got.status for got in first] == [200, 200]

    def test_more_requests_than_there_is_room(self):
        engine = fake()
        engine.hold.set()

        async def scenario(app):
            first = [Call(app, TEXT, {"prompt": "x", "max_tokens": 2}) for _ in range(2)]
            await until(lambda: len(engine.seen) == 2)
            late = await ask(app, TEXT, {"prompt": "x"})
            health = await ask(app, "/health")
            engine.hold.clear()
            return (
                late,
                health,
                [await call.done() for call in first],
                await ask(app, TEXT, {"prompt": "x", "max_tokens": 2}),
            )

        late, health, first, after = run(engine, scenario, limits=Limits(requests=2))
        assert late.status == 429 and late.headers["retry-after"] == "1"
        assert health.status == 200
        assert [got.status for got in [*first, after]] == [200] * 3  # red when a place is not given back


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_a_disconnect_frees_the_slot(self, path, stream):  # PF-73
        engine = fake(slots=1)
        body = {**(QUESTION if path == CHAT else {"prompt": "x"}), "stream": stream, "n": 2, "max_tokens": 500}

        async def scenario(app):
            call = Call(app, path, body)
            await until(lambda: len(engine.seen) == 2)
            call.leave()
            await call.done(5)
            await until(lambda: sorted(engine.cancelled) == [1001, 1002], 5)  # one ran, one waited
            return (await ask(app, "/metrics")).body.decode()

        text = run(engine, scenario)
        status = 200 if stream else 499
        assert f'kimi_jax_http_responses_total{{path="{path}",status="{status}"}} 1.0' in text

    def test_leaving_in_the_middle_of_the_body(self):
        async def scenario(app):
            call = Call(app, CHAT, b"{")
            call._incoming[0]["more_body"] = True
            call.leave()
            await call.done(5)  # red when it is taken for a failure
            return await ask(app, TEXT, {"prompt": "x", "max_tokens": 1})

        assert run(fake(), scenario).status == 200

    def test_a_client_that_reads_nothing(self):
        engine = fake(slots=1)

        async def scenario(app):
            async def stuck(message):
                if message["type"] == "http.response.body":
                    await asyncio.Event().wait()

            scope = {
                "type": "http",
                "method": "POST",
                "path": TEXT,
                "headers": [(b"content-type", b"application/json")],
            }
            scope |= {
                "query_string": b"",
                "raw_path": TEXT.encode(),
                "root_path": "",
                "scheme": "http",
                "http_version": "1.1",
            }
            bodies = [{"type": "http.request", "body": b'{"prompt": "x", "stream": true, "max_tokens": 900}'}]

            async def receive():
                return bodies.pop() if bodies else await asyncio.Event().wait()

            await asyncio.wait_for(app(scope, receive, stuck), 10)  # red (timeout) when nobody looks at the time
            await until(lambda: engine.idle, 5)

        run(engine, scenario, limits=Limits(write_seconds=0.1))


class TestTime:
    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_that_takes_too_long(self, stream):
        engine = fake()
        engine.hold.set()

        async def scenario(app):
            got = await ask(app, TEXT, {"prompt": "x", "stream": stream})
            await until(lambda: engine.cancelled == [1001])
            return got

        got = run(engine, scenario, limits=Limits(request_seconds=0.1))
        error = got.events[-2]["error"] if stream else got.error
        assert got.status == (200 if stream else 504)
        assert error["code"] == "timeout" and "--request-timeout" in error["message"]


class TestEnding:
    def test_not_ready_before_the_end_of_warm_up(self):
        import threading

        from kimi_jax.serve.app import App
        from kimi_jax.serve.pump import Pump
        from tests.serve.client import running

        engine = fake()
        engine.warm_gate = threading.Event()

        async def scenario():
            app = App(served(), Pump(engine))
            async with running(app):
                got = [await ask(app, "/health"), await ask(app, "/ready"), await ask(app, TEXT, {"prompt": "x"})]
                engine.warm_gate.set()
            return got

        health, ready, answer = asyncio.run(scenario())
        assert [health.status, ready.status, answer.status] == [200, 503, 503]
        assert answer.headers["retry-after"] == "10"

    def test_draining(self):
        engine = fake()
        engine.hold.set()

        async def scenario(app):
            call = Call(app, TEXT, {"prompt": "x", "max_tokens": 2})
            await until(lambda: len(engine.seen) == 1)
            app.draining = True
            got = [await ask(app, "/ready"), await ask(app, TEXT, {"prompt": "x"}), await ask(app, "/health")]
            engine.hold.clear()
            return [reply.status for reply in [*got, await call.done()]]

        assert run(engine, scenario) == [503, 503, 200, 200]  # the last: what is under way ends

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_failing_engine(self, stream):
        engine = fake()
        engine.hold.set()

        async def scenario(app):
            call = Call(app, TEXT, {"prompt": "x", "stream": stream})
            await until(lambda: len(engine.seen) == 1)
            engine.fail = RuntimeError("lost the device at 0xdeadbeef")
            got = await call.done(10)
            await until(lambda: not app.pump.alive)
            return got, await ask(app, "/health"), await ask(app, TEXT, {"prompt": "x"})

        got, health, after = run(engine, scenario)
        assert health.status == after.status == 503
        error = got.events[-2]["error"] if stream else got.error
        assert error["code"] == "engine_stopped"
        assert "deadbeef" not in got.body.decode()

    def test_what_nobody_foresaw_says_nothing_of_the_inside(self, monkeypatch):
        from kimi_jax.serve import app as module

        def broken(*_):
            raise KeyError("/etc/secret")

        monkeypatch.setattr(module, "prepare_completion", broken)

        async def scenario(app):
            call = Call(app, TEXT, {"prompt": "x"})
            with pytest.raises(KeyError):  # for the server's log
                await call.done()
            return call.reply

        got = run(fake(), scenario)
        assert got.status == 500 and got.error["code"] == "internal_error"
        assert "secret" not in got.body.decode()
