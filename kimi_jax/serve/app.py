"""The HTTP application: routes, and how each is answered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kimi_jax.serve.answers import Chat, Form, Text
from kimi_jax.serve.auth import Keys
from kimi_jax.serve.body import parse_body, read_body
from kimi_jax.serve.door import Door
from kimi_jax.serve.errors import ApiError, encode, response
from kimi_jax.serve.images import Images, Look, find_parts, no_images
from kimi_jax.serve.limits import Limits
from kimi_jax.serve.metrics import Metrics
from kimi_jax.serve.model import Served
from kimi_jax.serve.prepare import Prepared, detokenize, prepare_chat, prepare_completion, tokenize
from kimi_jax.serve.pump import Pump
from kimi_jax.serve.respond import Answer, Desk
from kimi_jax.serve.schema import Body, ChatBody, CompletionBody, DetokenizeBody, Generation, TokenizeBody
from kimi_jax.serve.scoring import Scorer
from kimi_jax.text.errors import shown
from kimi_jax.text.markup import END

B = TypeVar("B", bound=Body)
M = TypeVar("M", ChatBody, TokenizeBody)
T = TypeVar("T")


class App:
    """The server of one model, an ASGI application.

    Args:
      model: what is served.
      pump: runs its engine; started and stopped with the application.
      limits: bounds of requests.
      keys: API keys; without any, everybody may ask.
      scorer: of prompt tokens, where the model is served with it.
      images: its eyes, where it has any.

    Attributes:
      draining: set when the server was told to stop: nothing new is answered.
    """

    def __init__(
        self,
        model: Served,
        pump: Pump,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        scorer: Scorer | None = None,
        images: Images | None = None,
    ) -> None:
        self._model, self._pump, self._limits, self._images = model, pump, limits or Limits(), images
        self._metrics = Metrics(lambda: pump.stats)
        if images is not None:
            self._metrics.watch(images.kept, images.room)
        self._desk = Desk(pump, self._limits, self._metrics, scorer, images)
        # of its own: whatever else needs a thread never waits for the preparation of requests
        self._preparing = ThreadPoolExecutor(self._limits.preparing, "kimi-jax-prepare")
        self.draining = False
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._show_model, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._describe_tokenizer, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]
        self._paths = [route.path for route in routes]
        inner = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _refused,
                HTTPException: self._not_routed,
                ClientDisconnect: _left,
                Exception: _failed,
            },
            lifespan=self._lifespan,
        )
        inner.router.redirect_slashes = False
        self._door = Door(inner, Keys(keys), self._metrics, self._paths, self._limits.requests, self._closed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._pump.start()
        try:
            yield
        finally:
            await self._pump.stop()
            self._preparing.shutdown(wait=False, cancel_futures=True)
            if self._images is not None:
                await asyncio.to_thread(self._images.close)

    def _closed(self) -> ApiError | None:
        if self.draining:
            why, retry = "This server is stopping", "5"
        elif self._pump.ready:
            return None
        elif self._pump.alive:
            why, retry = "This server is still compiling", "10"
        else:
            return ApiError(503, "The engine has stopped", hint="Start the server again.", code="engine_stopped")
        return ApiError(503, why, hint=f"Try again in {retry} s.", code="not_ready", headers={"Retry-After": retry})

    async def _chat(self, request: Request) -> Response:
        body, look = await self._read_talk(request, ChatBody)
        prepared = await self._off_loop(lambda: prepare_chat(body, self._model, look))
        return self._answer(Chat(self._model.tokenizer, body.logprobs), body, prepared)

    async def _complete(self, request: Request) -> Response:
        body, prepared = await self._read(request, CompletionBody, prepare_completion)
        form = Text(self._model.tokenizer, body.logprobs is not None, prepared.prompts)
        return self._answer(form, body, prepared)

    def _answer(self, form: Form, body: Generation, prepared: Prepared) -> Response:
        name = body.model or self._model.names[0]
        return Answer(self._desk, name, form, prepared, stream=body.stream, include_usage=body.include_usage)

    async def _read(self, request: Request, kind: type[B], prepare: Callable[[B, Served], T]) -> tuple[B, T]:
        """The body of a request, read and made ready."""
        raw = await read_body(request, self._limits)

        def read() -> tuple[B, T]:
            body = kind.read(parse_body(raw))
            return body, prepare(body, self._model)

        return await self._off_loop(read)

    async def _read_talk(self, request: Request, kind: type[M]) -> tuple[M, Look]:
        """The body of a request with messages, and its images, read."""
        body, (parts, look) = await self._read(request, kind, lambda body, _: find_parts(body.messages or ()))
        if not parts:
            return body, look
        if self._images is None:
            return body, no_images(parts, self._model.no_images)
        return body, await self._images.look(parts, self._metrics)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """In a thread: a long prompt must not hold up the streams of others."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    async def _tokenize(self, request: Request) -> Response:
        body, look = await self._read_talk(request, TokenizeBody)
        ids = await self._off_loop(lambda: tokenize(body, self._model, look))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._model.capacity, "tokens": ids}
        if body.return_token_strs:
            token_bytes = self._model.tokenizer.token_bytes
            answer["token_strs"] = [token_bytes(number).decode(errors="replace") for number in ids]
        return _json(answer)

    async def _detokenize(self, request: Request) -> Response:
        _, text = await self._read(request, DetokenizeBody, detokenize)
        return _json({"prompt": text})

    async def _describe_tokenizer(self, _: Request) -> Response:
        """For evaluation clients that then tokenize here: without it lm-eval looks for a tokenizer on its own machine."""
        words = self._model.tokenizer
        info = {"tokenizer_class": "kimi", "vocab_size": words.vocab_size, "eos_token": END, "bos_token": None}
        return _json({**info, "pad_token": "[PAD]" if "[PAD]" in words.special_ids else None})

    async def _list_models(self, _: Request) -> Response:
        return _json({"object": "list", "data": self._model.listing()})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._model.check_name(name)
        return _json(next(entry for entry in self._model.listing() if entry["id"] == name))

    async def _health(self, _: Request) -> Response:
        if not self._pump.alive:
            raise ApiError(503, "The engine has stopped", hint="Start the server again.", code="engine_stopped")
        return _json({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        if (closed := self._closed()) is not None:
            raise closed
        return _json({"status": "ready"})

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _not_routed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            told = ApiError(
                405,
                f"{request.method[:20]} is not answered here",
                hint=f"{allowed} works.",
                code="method_not_allowed",
                headers=error.headers,
            )
        else:
            paths = ", ".join(self._paths)
            told = ApiError(404, f"There is no {shown(request.url.path)}", hint=f"Paths: {paths}.", code="not_found")
        return response(told)


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response(error)


def _left(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; it is counted


def _failed(_: Request, error: Exception) -> Response:
    """For what nobody foresaw. The error is logged, and the client learns nothing of it."""
    told = ApiError(500, "The server failed at this request", hint="Its log says where.", code="internal_error")
    return response(told)
