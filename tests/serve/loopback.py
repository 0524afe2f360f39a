"""A server on a free port of this machine, in a thread of this process."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kimi_jax.serve.limits import Limits
from kimi_jax.serve.run import Server, bind
from tests.serve.model import served


@contextmanager
def serving(
    engine: Any,
    limits: Limits | None = None,
    keys: tuple[str, ...] = (),
    model: Any = None,
    scorer: Any = None,
    images: Any = None,
) -> Iterator["Loopback"]:
    """The server, warmed up; it drains at the end."""
    server, listener = (
        Server(model or served(), engine, limits or Limits(), keys, "warning", scorer, images),
        bind("127.0.0.1", 0),
    )
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_for(lambda: server.started and (server.pump.ready or server.pump.failure), 400)
        yield Loopback(server, url)
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


@dataclass
class Loopback:
    """A running server and where it is reached."""

    server: Server
    url: str


def wait_for(condition: Any, seconds: float = 60, every: float = 0.003) -> None:
    """Until something that another thread does has happened."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(every)
