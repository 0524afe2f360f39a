"""A server that speaks OpenAI's protocol and answers from a script: for clients whose model does not matter."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | tuple[int, dict[str, Any]] | Iterable[Any]


class FakeServer:
    """What a test sees of the server.

    Attributes:
      url: where it listens.
      asked: (path, body) of every request, in order of arrival.
      most: requests that were under way together at most.
    """

    def __init__(self, answer: Callable[[str, dict[str, Any]], Answer], key: str | None = None) -> None:
        self.answer, self.key = answer, key
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.most, self._open, self._lock = 0, 0, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "fake", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if fake.key and self.headers["authorization"] != f"Bearer {fake.key}":
                    self._send({"error": {"message": "wrong key"}}, 401)
                    return
                with fake._lock:
                    fake.asked.append((self.path, body))
                    fake._open += 1
                    fake.most = max(fake.most, fake._open)
                try:
                    answer = fake.answer(self.path, body)
                    if isinstance(answer, tuple):
                        self._send(answer[1], answer[0])
                    elif isinstance(answer, dict):
                        self._send(answer)
                    else:
                        self._stream(answer)
                finally:
                    with fake._lock:
                        fake._open -= 1

            def _send(self, value: dict[str, Any], status: int = 200) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _stream(self, chunks: Iterable[Any]) -> None:
                """Chunks as server-sent events; None in their place breaks the connection off."""
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for chunk in [*chunks] if isinstance(chunks, list) else chunks:
                    if chunk is None:
                        self.close_connection = True
                        self.connection.shutdown(2)
                        return
                    self._event(json.dumps(chunk))
                self._event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

            def _event(self, data: str) -> None:
                event = f"data: {data}\n\n".encode()
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                self.wfile.flush()

        return Handler


def chunks(*texts: str, prompt_tokens: int = 1) -> list[dict[str, Any]]:
    """A streamed completion of some texts, a token each, and its usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    return [*({"choices": [{"text": text}]} for text in texts), {"choices": [], "usage": usage}]
