"""Calls an ASGI application in this process, without a network: fast enough for thousands of requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_no_constant)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """What a stream has sent, comments left out."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [one if one == "[DONE]" else json.loads(one, parse_constant=_no_constant) for one in data]


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[None]:
    """Starts and stops an application as a server does."""
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan", "state": {}}, incoming.get, outgoing.put))
    await incoming.put({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await incoming.put({"type": "lifespan.shutdown"})
        assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
        await task


class Call:
    """One request under way, for tests that leave in its middle."""

    def __init__(
        self, app: Any, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
    ):
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        self.reply, self._left = Reply(), asyncio.Event()
        self._incoming = [{"type": "http.request", "body": raw, "more_body": False}]
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"), "path": path, "raw_path": path.encode(errors="replace"),
            "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._incoming:
            return self._incoming.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.chunks.put_nowait(message.get("body", b""))

    def leave(self) -> None:
        """As if the client had closed its connection."""
        self._left.set()

    async def done(self, seconds: float = 30) -> Reply:
        await asyncio.wait_for(self.task, seconds)
        return self.reply


async def ask(app: Any, path: str, body: Any = None, **options: Any) -> Reply:
    return await Call(app, path, body, **options).done()


def run(engine: Any, scenario: Any, model: Any = None, **options: Any) -> Any:
    """Runs ``await scenario(app)`` with an application on an engine, warmed up."""
    from kimi_jax.serve.app import App
    from kimi_jax.serve.pump import Pump
    from tests.serve.model import served

    async def all_of_it() -> Any:
        pump = Pump(engine)
        app = App(model or served(), pump, **options)
        app.pump = pump
        async with running(app):
            await until(lambda: pump.ready)
            return await scenario(app)

    return asyncio.run(all_of_it())


async def until(condition: Any, seconds: float = 20) -> None:
    """Gives way to everything else until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
