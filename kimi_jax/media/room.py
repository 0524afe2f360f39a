"""Host memory of pictures, decoded or as rows: counted as long as anything holds them, whoever forgets them last."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from kimi_jax.media.errors import BusyError


class Room:
    """Bytes of what is alive, under a limit; safe to share between threads.

    Args:
      limit: bytes.
      give_up: forgets something that is only kept for later; False where there is nothing more.
    """

    def __init__(self, limit: int, give_up: Callable[[], bool] = lambda: False) -> None:
        self.limit, self._give_up = limit, give_up
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._bytes = 0
        # what ends may end anywhere, in the middle of a count too: it is taken off later
        self._ended: deque[int] = deque()

    @property
    def bytes(self) -> int:
        """What is alive now."""
        with self._lock:
            while self._ended:
                self._bytes -= self._ended.popleft()
            return self._bytes

    def hold(self, thing: Any, count: int) -> None:
        """Counts ``count`` bytes until ``thing`` is gone."""
        with self._lock:
            self._bytes += count
        weakref.finalize(thing, self._ended.append, count).atexit = False

    def take(self, thing: Any, count: int) -> None:
        """As ``hold``, where that many bytes find room; raises BusyError as ``check``."""
        with self._taking:  # between look and count nobody else looks
            self.check(count)
            self.hold(thing, count)

    def check(self, count: int) -> None:
        """Raises BusyError where so many more bytes find no room, whatever is given up for them."""
        while self.bytes + count > self.limit:
            if not self._give_up():
                raise BusyError(f"images fill the {self.limit:,} bytes that they may take on the host; try again")
