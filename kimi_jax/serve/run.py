"""Runs the application in this process until it is told to stop: SIGTERM and SIGINT let answers under way end."""

import logging
import os
import signal
import socket
import time
from types import FrameType

import uvicorn

from kimi_jax.serve.app import App
from kimi_jax.serve.images import Images
from kimi_jax.serve.limits import Limits
from kimi_jax.serve.model import Served, ServeError
from kimi_jax.serve.pump import Engine, Pump
from kimi_jax.serve.scoring import Scorer

log = logging.getLogger("uvicorn.error")

IDLE_SECONDS = 65
"""A connection without a request is kept so long: longer than the 60 s of common proxies, which else meet a closed one."""


class Server(uvicorn.Server):
    """uvicorn, with the application told that it drains, and stopped when the engine fails."""

    def __init__(
        self,
        model: Served,
        engine: Engine,
        limits: Limits,
        keys: tuple[str, ...] = (),
        log_level: str = "info",
        scorer: Scorer | None = None,
        images: Images | None = None,
    ) -> None:
        self._scorer, self._images, self._began = scorer, images, time.monotonic()
        self._write_seconds = limits.write_seconds
        self.pump = Pump(engine, self._engine_failed, self._finish_warming)
        self.app = App(model, self.pump, limits, keys, scorer, images)
        super().__init__(
            uvicorn.Config(
                self.app,
                ws="none",
                lifespan="on",
                log_level=log_level,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=round(limits.drain_seconds),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the door. Connections take their options from the listener."""
        for listener in sockets or ():
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # a connection that nobody reads cannot be closed from here while there is more to send; the kernel drops it
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._write_seconds))
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.draining = True
        super().handle_exit(sig, frame)

    def _finish_warming(self) -> None:
        if self._scorer is not None:
            self._scorer.warm()
        if self._images is not None:
            self._images.warm()
        log.info("Ready: everything was compiled in %.0f s", time.monotonic() - self._began)

    def _engine_failed(self) -> None:
        self.should_exit = True  # whoever watches the process starts another


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, before anything is loaded; nobody is let in yet. Raises ServeError."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        problem = f"{host} port {port}: {error.strerror or error}"
        raise ServeError(
            "The server cannot listen", [problem], "Give another --port, or --port 0 for a free one."
        ) from None
    return made


def serve(server: Server, listener: socket.socket) -> bool:
    """Serves at a bound address until a signal or a failure of the engine; returns whether it ended as it should."""
    # uvicorn raises the signal again when all is done: the process has then nothing left to do about it
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.pump.compiling:
        log.info("Stopped while compiling")
        os._exit(0)  # a compiler cannot be interrupted, and tearing the process down under it may crash
    return server.pump.failure is None
