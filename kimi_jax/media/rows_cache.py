"""The tower's rows of pictures seen lately, on the host: a picture in a growing conversation is computed once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from kimi_jax.media.picture import Picture

Compute = Callable[[list[Picture]], Sequence[np.ndarray]]


class RowsCache:
    """Rows by digest, those used longest ago given up first; safe to share between threads.

    Rows that somebody still holds are found even after they were given up.

    Args:
      limit: bytes that are kept; a picture with more is not kept at all.

    Attributes:
      hits: pictures whose rows were found.
      misses: pictures whose rows were not.
      bytes: that are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.misses = self.bytes = 0
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, np.ndarray] = WeakValueDictionary()

    def rows(self, pictures: Sequence[Picture], compute: Compute) -> list[np.ndarray]:
        """The rows of each picture; what is missing is computed in one call, a picture that comes twice once.

        Args:
          pictures: in any order.
          compute: gives the rows of pictures that are not kept.
        """
        found = self.find(pictures)
        missing = {picture.digest: picture for picture in pictures if picture.digest not in found}
        if missing:
            computed = compute(list(missing.values()))
            for digest, rows in zip(missing, computed, strict=True):
                found[digest] = rows
                self.add(digest, rows)
        return [found[picture.digest] for picture in pictures]

    def find(self, pictures: Sequence[Picture]) -> dict[bytes, np.ndarray]:
        """The rows of those pictures of which there are any."""
        found: dict[bytes, np.ndarray] = {}
        with self._lock:
            for digest in dict.fromkeys(picture.digest for picture in pictures):
                rows = self._alive.get(digest)
                if rows is not None:
                    found[digest] = rows
                    if digest in self._rows:
                        self._rows.move_to_end(digest)
            missing = len({picture.digest for picture in pictures} - found.keys())
            self.misses += missing
            self.hits += len(pictures) - missing
        return found

    def add(self, digest: bytes, rows: np.ndarray) -> None:
        """Keeps rows that were computed."""
        with self._lock:
            self._alive.setdefault(digest, rows)
            if rows.nbytes > self.limit or digest in self._rows:
                return
            self._rows[digest] = rows
            self.bytes += rows.nbytes
            while self.bytes > self.limit:
                self._drop()

    def give_up(self) -> bool:
        """Forgets the rows used longest ago; whether there were any."""
        with self._lock:
            if not self._rows:
                return False
            self._drop()
            return True

    def _drop(self) -> None:
        _, dropped = self._rows.popitem(last=False)
        self.bytes -= dropped.nbytes
