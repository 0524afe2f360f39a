"""Pictures read in threads of their own, a few at a time, so that nothing else waits for a decoder."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kimi_jax.media.errors import BusyError, MediaError
from kimi_jax.media.fetch import PORTS, FetchRules
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.picture import Picture
from kimi_jax.media.prepare import prepare
from kimi_jax.media.room import Room
from kimi_jax.media.settings import Settings
from kimi_jax.media.source import Found, from_url


@dataclass(frozen=True)
class PictureReader:
    """Reads pictures; safe to share between threads.

    Attributes:
      settings: how the model wants them.
      limits: of one picture.
      rules: which other machines may be asked; None for none.
      threads: pictures that are decoded at a time. Memory: about 10 bytes per pixel of ``limits`` for each.
      waiting: pictures that may wait beside those.
      fetchers: pictures that are waited for from other machines at a time; a slow machine keeps no decoder.
      room: counts decoded pictures as long as anything holds them, each with the rows that it will become: what has been read
        finds room for its rows.
      row_bytes: of one row.
    """

    settings: Settings
    limits: Limits = field(default_factory=Limits)
    rules: FetchRules | None = None
    threads: int = 2
    waiting: int = 64
    fetchers: int = 8
    room: Room | None = None
    row_bytes: int = 0
    _seats: threading.BoundedSemaphore = field(init=False, repr=False)
    _pool: ThreadPoolExecutor = field(init=False, repr=False)
    _fetchers: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seats", threading.BoundedSemaphore(self.threads + self.waiting))
        object.__setattr__(self, "_pool", ThreadPoolExecutor(self.threads, "kimi-jax-picture"))
        object.__setattr__(self, "_fetchers", ThreadPoolExecutor(self.fetchers, "kimi-jax-fetch"))

    def submit_url(self, url: str) -> Future[Picture]:
        """The picture behind the URL of an image part; the future raises MediaError, or BusyError without room.

        Raises:
          BusyError: too many wait.
        """
        far = self.rules is not None and url[:8].partition(":")[0].lower() in PORTS
        return self._submit(lambda deadline: from_url(url, self.limits, deadline, self.rules), far=far)

    def submit_bytes(self, data: bytes) -> Future[Picture]:
        """The picture in a file's bytes; the future raises MediaError, or BusyError without room."""
        return self._submit(lambda deadline: Found(data))

    def close(self) -> None:
        """Waits for what is being read and drops what waits."""
        self._fetchers.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, find: Callable[[Deadline], Found], *, far: bool = False) -> Future[Picture]:
        if not self._seats.acquire(blocking=False):
            raise BusyError(f"{self.threads + self.waiting} images are being read, which is the limit; try again")
        pool, read = (self._fetchers, self._fetch) if far else (self._pool, self._read)
        try:
            future = pool.submit(read, find, self.limits.deadline())
        except BaseException:
            self._seats.release()
            raise
        future.add_done_callback(lambda _: self._seats.release())
        return future

    def _fetch(self, find: Callable[[Deadline], Found], deadline: Deadline) -> Picture:
        deadline.check("before its turn")
        found = find(deadline)
        return self._pool.submit(self._read, lambda _: found, deadline).result()

    def _read(self, find: Callable[[Deadline], Found], deadline: Deadline) -> Picture:
        deadline.check("before its turn")
        if self.room is not None:
            self.room.check(1)  # how large it is shows later: those being read may go beyond
        data, claimed = find(deadline)
        picture = prepare(data, self.settings, self.limits, deadline, claimed)
        if self.room is not None:
            self._take(self.room, picture)
        return picture

    def _take(self, room: Room, picture: Picture) -> None:
        """Counts a picture, unless it is more than half of what all of them may take, or nothing is left."""
        count, most = picture.patches.nbytes + picture.tokens * self.row_bytes, room.limit // 2
        if count > most:
            size = f"{picture.width:,} x {picture.height:,} pixels"
            raise MediaError(f"its {size} take {count:,} bytes of the host as patches and rows; up to {most:,} work")
        room.take(picture, count)
