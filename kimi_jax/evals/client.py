"""A small client of the OpenAI API, from the standard library: it costs little beside what it measures."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from kimi_jax.problems import ProblemsError

Item = TypeVar("Item")
Found = TypeVar("Found")

LONGEST_LINE = 16 << 20
"""Bytes of one line of an answer."""


class ServerError(RuntimeError):
    """A server that cannot be reached, refuses, or breaks off. ``status`` is None without an HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """One connection, kept open between requests. Not to be shared between threads.

    Args:
      url: of the server, with or without ``/v1``.
      key: sent as a bearer token, where given.
      timeout: seconds without news until a request is given up.

    Raises:
      ProblemsError: not the URL of a server.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ProblemsError(f"No server has the URL {url!r}", ["http://127.0.0.1:8000 is one"])
        connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = connection(host, port, timeout=timeout)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        self._headers |= {"authorization": f"Bearer {key}"} if key else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def models(self) -> list[str]:
        """The names of the models that are served."""
        answer = self._json(self._ask("GET", "/v1/models", None))
        return [model["id"] for model in answer["data"]]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises ServerError."""
        return self._json(self._ask("POST", path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of one answer as they come. Raises ServerError."""
        response = self._ask("POST", path, {**body, "stream": True})
        done = False
        try:
            while line := response.readline(LONGEST_LINE):
                field, _, value = line.strip().partition(b":")
                if field != b"data":
                    continue
                if value.strip() == b"[DONE]":
                    done = True
                    response.read()  # to the end of the answer: the connection can then be used again
                    break
                chunk = json.loads(value)
                if "error" in chunk:
                    raise ServerError(f"the answer broke off: {_message(chunk)}")
                yield chunk
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"the answer broke off: {type(error).__name__}: {error}") from error
        finally:
            if not done:
                self._connection.close()
        if not done:
            raise ServerError("the answer broke off without [DONE]")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        try:
            try:
                self._connection.request(method, self._root + path, content, self._headers)
                response = self._connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._connection.close()  # it was closed while idle
                self._connection.request(method, self._root + path, content, self._headers)
                response = self._connection.getresponse()
            if response.status != 200:
                text = response.read(LONGEST_LINE).decode(errors="replace")
                raise ServerError(f"HTTP {response.status}: {_message(text)}", response.status)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{type(error).__name__}: {error}") from error
        return response

    def _json(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise ServerError(f"the answer is no JSON: {type(error).__name__}: {error}") from error


def ask_each(
    items: Sequence[Item], clients: int, url: str, key: str | None, ask: Callable[[Client, Item], Found]
) -> list[Found]:
    """What ``ask`` finds for each item, in their order, by some clients at once.

    An interruption ends it as soon as the requests under way have ended.
    """
    made: list[Client] = []
    here = threading.local()

    def one(item: Item) -> Found:
        if not hasattr(here, "client"):
            here.client = Client(url, key)
            made.append(here.client)
        return ask(here.client, item)

    pool = ThreadPoolExecutor(max(1, min(clients, len(items))))
    try:
        return list(pool.map(one, items))  # it cancels what has not begun when it is left early
    finally:
        pool.shutdown()
        for client in made:
            client.close()


def _message(answer: Any) -> str:
    """What an error says, in OpenAI's form or any other."""
    try:
        error = (json.loads(answer) if isinstance(answer, str) else answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return str(answer)[:500]
