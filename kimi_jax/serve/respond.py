"""From a prepared request to its HTTP response: waits for the engine's news, whole or streamed, as long as the client does."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_jax import __version__
from kimi_jax.completion import Completion, Piece
from kimi_jax.engine.engine import EngineFull
from kimi_jax.engine.request import Event, RequestError
from kimi_jax.serve.answers import Form, Json, Text, usage
from kimi_jax.serve.choice import Choice
from kimi_jax.serve.errors import ApiError, encode, refused
from kimi_jax.serve.images import Images
from kimi_jax.serve.limits import Limits
from kimi_jax.serve.metrics import Metrics
from kimi_jax.serve.prepare import Prepared
from kimi_jax.serve.pump import EngineStopped, Flow, Item, Pump
from kimi_jax.serve.scoring import Scorer

log = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks
]


@dataclass(frozen=True)
class Desk:
    """What every answer needs of its server."""

    pump: Pump
    limits: Limits
    metrics: Metrics
    scorer: Scorer | None = None
    images: Images | None = None


class ClientStuck(Exception):
    """Nobody reads what is sent."""


class Answer(Response):
    """The response to one request for answers. Its work ends when the client goes.

    Args:
      desk: of the server.
      model: the name that the answer carries.
      form: of the answer.
      prepared: what is asked of the engine.
      stream: send the answer as it comes.
      include_usage: end a stream with a chunk that counts tokens.
    """

    def __init__(
        self, desk: Desk, model: str, form: Form, prepared: Prepared, *, stream: bool, include_usage: bool
    ) -> None:
        super().__init__()
        self._desk, self._form, self._prepared = desk, form, prepared
        self._stream, self._include_usage = stream, include_usage
        self._began = time.monotonic()
        self._first: float | None = None
        self._head: Json = {
            "id": f"{form.prefix}{uuid.uuid4().hex}",
            "object": form.chunk if stream else form.whole,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"kimi-jax-{__version__}",
        }
        self._choices = [Choice(place, prepared.reading, request) for place, request in enumerate(prepared.requests)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._answer(send))
        except ClientStuck:
            log.warning("a client read nothing for %g s; its connection is closed", self._desk.limits.write_seconds)

    async def _answer(self, send: Send) -> None:
        flow = None
        try:
            if self._prepared.scored:
                await self._score_prompts()
            if self._prepared.pictures:
                await self._see()
            if self._prepared.draws:
                flow = await self._submit()
            await (self._send_stream if self._stream else self._send_whole)(flow, send)
        finally:
            if flow is not None:
                flow.close()
            self._count()

    async def _submit(self) -> Flow:
        try:
            async with self._deadline():
                return await self._desk.pump.submit(self._prepared.requests)
        except RequestError as error:
            raise refused(error) from None
        except EngineFull as error:
            wait = str(max(1, math.ceil(error.retry_after)))
            raise ApiError(
                429,
                "Too many requests wait for this model",
                hint=f"Try again in {wait} s.",
                code="queue_full",
                headers={"Retry-After": wait},
            ) from None
        except EngineStopped as error:
            raise _stopped() from error

    async def _see(self) -> None:
        """Has the tower look at the images, and gives what it saw to every request."""
        images, prepared = self._desk.images, self._prepared
        assert images is not None
        try:
            async with self._deadline():
                spans = await images.spans(prepared.places, prepared.pictures, self._desk.pump)
        except EngineStopped as error:
            raise _stopped() from error
        requests = tuple(replace(request, images=spans) for request in prepared.requests)
        self._prepared = replace(prepared, requests=requests)

    async def _score_prompts(self) -> None:
        scorer, requests, each = self._desk.scorer, self._prepared.requests, self._prepared.each
        assert scorer is not None and isinstance(self._form, Text)
        scored: list[list[Event]] = []
        for request in requests[::each]:
            try:
                async with self._deadline():
                    steps = await self._desk.pump.work(scorer.scores(request.ids, request.logprobs))
            except EngineStopped as error:
                raise _stopped() from error
            scored += [[event for step in steps for event in step]] * each
        self._form.score_prompts(scored)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        seconds = self._desk.limits.request_seconds
        try:
            async with asyncio.timeout(self._began + seconds - time.monotonic()):
                yield
        except TimeoutError:
            raise ApiError(
                504,
                f"This answer took longer than {seconds:g} s",
                hint="Ask for fewer tokens, or start the server with a larger --request-timeout.",
                code="timeout",
            ) from None

    async def _send_whole(self, flow: Flow | None, send: Send) -> None:
        async with self._deadline():
            async for _ in self._pieces(flow):
                pass
        done = await self._completions()
        choices = [self._form.choice(at, one, self._choices[at].scored) for at, one in enumerate(done)]
        body = encode({**self._head, "choices": choices, "usage": self._usage(flow, done)})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, flow: Flow | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async with self._deadline():
                await self._send_chunks(flow, send)
        except ApiError as error:
            await self._write(send, encode({"error": error.body}))
        except ClientStuck:
            raise
        except Exception:
            failed = ApiError(500, "The server failed in the middle of this answer", code="internal_error")
            await self._write(send, encode({"error": failed.body}))
            await self._close(send)
            raise
        await self._close(send)

    async def _close(self, send: Send) -> None:
        await self._write(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, flow: Flow | None, send: Send) -> None:
        for choice in self._choices:
            if (opening := self._form.opening(choice.place)) is not None:
                await self._chunk(send, [opening])
        async for choice, piece in self._pieces(flow, silence=self._desk.limits.silence_seconds):
            if choice is None:
                await self._put(send, b": still working\n\n")
            elif piece.text or piece.reasoning or piece.tool_calls or piece.finish_reason:
                # ids that show nothing yet give their scores with the next chunk
                await self._chunk(send, [self._form.delta(choice.place, piece, choice.take_scored())])
        if self._include_usage:
            await self._chunk(send, [], self._usage(flow, await self._completions()))

    async def _pieces(
        self, flow: Flow | None, silence: float | None = None
    ) -> AsyncIterator[tuple[Choice, Piece] | tuple[None, Piece]]:
        """The news of every choice until all have ended; (None, empty) whenever nothing came for ``silence`` seconds."""
        if flow is None:  # the prompts are all there is
            for choice in self._choices:
                yield choice, choice.push([Event(choice.place, None, 0.0, "length")])
            return
        waiting = set(range(len(self._choices)))
        while waiting:
            try:
                async with asyncio.timeout(silence):
                    news = await flow.next()
            except TimeoutError:
                yield None, Piece()
                continue
            except EngineStopped as error:
                raise _stopped() from error
            if self._first is None:
                self._first = time.monotonic()
                self._desk.metrics.first_token.observe(self._first - self._began)
            for place, events in _by_place(news).items():
                if place not in waiting:
                    continue
                choice = self._choices[place]
                piece = choice.push(events)
                if choice.finish is not None:
                    waiting.discard(place)
                    self._desk.metrics.finished.labels(choice.finish).inc()
                    if events[-1].finish is None:  # a stop string: the engine would go on
                        flow.cancel(place)
                if (failure := choice.failure) is not None:
                    hint = "Nothing of this answer can be trusted; other requests go on."
                    raise ApiError(500, failure, hint=hint, code="answer_failed")
                yield choice, piece

    async def _chunk(self, send: Send, choices: list[Json], counts: Json | None = None) -> None:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = counts
        await self._write(send, encode(chunk))

    async def _write(self, send: Send, data: bytes) -> None:
        await self._put(send, b"data: " + data + b"\n\n")

    async def _put(self, send: Send, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._desk.limits.write_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientStuck from None

    async def _completions(self) -> list[Completion]:
        """The whole answers. In a thread: a long one is read once more, which must not hold up the streams of others."""
        return await asyncio.to_thread(lambda: [choice.completion() for choice in self._choices])

    def _usage(self, flow: Flow | None, done: Sequence[Completion]) -> Json:
        counts = [one.usage for one in done]
        # answers to the same prompt share it: it counts once, as OpenAI's API counts it
        each = self._prepared.each
        return usage(
            sum(one.prompt_tokens for one in counts[::each]),
            sum(one.completion_tokens for one in counts),
            sum(flow.cached[::each]) if flow else 0,
            sum(one.reasoning_tokens for one in counts) if self._prepared.reading.chat else None,
            [one.drafts for one in counts if one.drafts is not None],
        )

    def _count(self) -> None:
        """Adds the times of this answer, complete or not, to the metrics."""
        now, drawn = time.monotonic(), max(choice.drawn for choice in self._choices)
        self._desk.metrics.request.observe(now - self._began)
        if self._first is not None and drawn > 1:
            self._desk.metrics.per_token.observe((now - self._first) / (drawn - 1))


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` to its end, or until the client goes: then it is cancelled, and nothing is left to answer."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        left = not working.done()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    if not left:
        working.result()
    elif not working.cancelled():
        working.exception()  # nobody is left to be told


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _by_place(news: Sequence[Item]) -> dict[int, list[Event]]:
    places: dict[int, list[Event]] = {}
    for place, event in news:
        places.setdefault(place, []).append(event)
    return places


def _stopped() -> ApiError:
    return ApiError(503, "The engine has stopped", hint="The server must be started again.", code="engine_stopped")
