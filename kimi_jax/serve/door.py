"""What every request passes before anything is read of it: is there room, is the key right; and what was answered is counted."""

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kimi_jax.serve.auth import Keys
from kimi_jax.serve.errors import ApiError, response
from kimi_jax.serve.metrics import Metrics

OPEN = ("/health", "/ready", "/metrics")
"""Paths that need no key and always have room: whoever looks after the process asks them."""


class Door:
    """Wraps an application.

    Args:
      inner: the application.
      keys: who may pass.
      metrics: counts responses.
      paths: those that are counted by name; all others are counted together.
      room: requests that may be inside at once.
      closed: why nothing new is let in, or None.
    """

    def __init__(
        self,
        inner: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        paths: Collection[str],
        room: int,
        closed: Callable[[], ApiError | None],
    ) -> None:
        self._inner, self._keys, self._metrics, self._paths = inner, keys, metrics, frozenset(paths)
        self._room, self._closed, self._inside = room, closed, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        path, status = scope["path"], 499  # of a request whose client went before it was answered

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        inside = path not in OPEN
        self._inside += inside
        try:
            if inside:
                self._check(scope)
            await self._inner(scope, receive, counted)
        except ApiError as error:
            await response(error)(scope, receive, counted)
        finally:
            self._inside -= inside
            self._metrics.responses.labels(path if path in self._paths else "other", str(status)).inc()

    def _check(self, scope: Scope) -> None:
        self._keys.check(Headers(scope=scope))
        if (closed := self._closed()) is not None:
            raise closed
        if self._inside > self._room:
            raise ApiError(
                429,
                f"{self._room} requests are being answered, and no more are let in",
                hint="Try again in 1 s.",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
