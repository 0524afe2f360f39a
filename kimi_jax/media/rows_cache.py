"""The tower's rows of pictures seen lately, on the host: a picture in a growing conversation is computed once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kimi_jax.media.picture import Picture

Compute = Callable[[list[Picture]], Sequence[np.ndarray]]


class RowsCache:
    """Rows by digest, those used longest ago given up first; safe to share between threads.

    Args:
      limit: bytes that are kept; a picture with more is not kept at all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.misses = self.bytes = 0
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def rows(self, pictures: Sequence[Picture], compute: Compute) -> list[np.ndarray]:
        """The rows of each picture; what is missing is computed in one call, a picture that comes twice once.

        Args:
          pictures: in any order.
          compute: gives the rows of pictures that are not kept.
        """
        found: dict[bytes, np.ndarray] = {}
        missing: dict[bytes, Picture] = {}
        with self._lock:
            for picture in pictures:
                kept = self._rows.get(picture.digest)
                if kept is None:
                    missing[picture.digest] = picture
                else:
                    self._rows.move_to_end(picture.digest)
                    found[picture.digest] = kept
            self.misses += len(missing)
            self.hits += len(pictures) - len(missing)
        if missing:
            computed = dict(zip(missing, compute(list(missing.values())), strict=True))
            with self._lock:
                for digest, rows in computed.items():
                    self._keep(digest, rows)
            found |= computed
        return [found[picture.digest] for picture in pictures]

    def _keep(self, digest: bytes, rows: np.ndarray) -> None:
        if rows.nbytes > self.limit or digest in self._rows:
            return
        self._rows[digest] = rows
        self.bytes += rows.nbytes
        while self.bytes > self.limit:
            _, dropped = self._rows.popitem(last=False)
            self.bytes -= dropped.nbytes
