"""Pictures read in threads of their own, a few at a time, so that nothing else waits for a decoder."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kimi_jax.media.fetch import FetchRules
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.picture import Picture
from kimi_jax.media.prepare import prepare
from kimi_jax.media.settings import Settings
from kimi_jax.media.source import Found, from_file, from_url


class BusyError(RuntimeError):
    """As many pictures wait as may; try again later. HTTP 503."""


@dataclass(frozen=True)
class PictureReader:
    """Reads pictures; safe to share between threads.

    Attributes:
      settings: how the model wants them.
      limits: of one picture.
      rules: which other machines may be asked; None for none.
      threads: pictures that are decoded at a time. Memory: about 10 bytes per pixel of ``limits`` for each.
      waiting: pictures that may wait beside those.
    """

    settings: Settings
    limits: Limits = field(default_factory=Limits)
    rules: FetchRules | None = None
    threads: int = 2
    waiting: int = 64
    _room: threading.BoundedSemaphore = field(init=False, repr=False)
    _pool: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_room", threading.BoundedSemaphore(self.threads + self.waiting))
        object.__setattr__(self, "_pool", ThreadPoolExecutor(self.threads, "kimi-jax-picture"))

    def submit_url(self, url: str) -> Future[Picture]:
        """The picture behind the URL of an image part; the future raises MediaError.

        Raises:
          BusyError: too many wait.
        """
        return self._submit(lambda deadline: from_url(url, self.limits, deadline, self.rules))

    def submit_bytes(self, data: bytes) -> Future[Picture]:
        """The picture in a file's bytes; the future raises MediaError."""
        return self._submit(lambda deadline: Found(data))

    def read_file(self, path: str | os.PathLike[str]) -> Picture:
        """A local file's picture, in this thread.

        Raises:
          MediaError: it cannot be used.
        """
        return self._read(lambda deadline: from_file(path, self.limits), self.limits.deadline())

    def close(self) -> None:
        """Waits for what is being read and drops what waits."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, find: Callable[[Deadline], Found]) -> Future[Picture]:
        if not self._room.acquire(blocking=False):
            raise BusyError(f"{self.threads + self.waiting} images are being read, which is the limit; try again")
        try:
            future = self._pool.submit(self._read, find, self.limits.deadline())
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _read(self, find: Callable[[Deadline], Found], deadline: Deadline) -> Picture:
        deadline.check("before its turn")
        data, claimed = find(deadline)
        return prepare(data, self.settings, self.limits, deadline, claimed)
