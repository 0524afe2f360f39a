"""Numbered places with counts of their users: pages of latent rows, recurrent checkpoints, slots."""

from collections.abc import Iterable


class Pool:
    """The places 0 .. ``size`` - 1. A place is free while nobody uses it; a free one is never read.

    A cache may be one of the users of a place, and is told apart: what it alone uses can be had back.

    Attributes:
      idle: places that only the cache uses.
    """

    def __init__(self, size: int) -> None:
        self._users = [0] * size
        self._free = list(range(size))
        self._kept: set[int] = set()
        self.idle = 0

    @property
    def size(self) -> int:
        return len(self._users)

    @property
    def free(self) -> int:
        """How many places nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` free places, used once each; None and no change where fewer are free."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        for place in taken:
            self._users[place] = 1
        return taken

    def users(self, place: int) -> int:
        """How often a place is used."""
        return self._users[place]

    def keep(self, place: int) -> None:
        """The cache becomes one more user of a place.

        Raises:
          ValueError: the place is free, or the cache uses it already.
        """
        if place in self._kept:
            raise ValueError(f"place {place} is kept already")
        self.share([place])
        self._kept.add(place)

    def give_up(self, place: int) -> None:
        """The cache no longer uses a place.

        Raises:
          ValueError: it did not.
        """
        if place not in self._kept:
            raise ValueError(f"place {place} is not kept; only a kept one can be given up")
        self._kept.remove(place)
        self.idle -= self._users[place] == 1
        self.drop([place])

    def share(self, places: Iterable[int]) -> None:
        """One more user of each place.

        Raises:
          ValueError: a place is free.
        """
        for place in places:
            self._used(place)
            self.idle -= place in self._kept and self._users[place] == 1
            self._users[place] += 1

    def drop(self, places: Iterable[int]) -> None:
        """One user less of each place; the last one frees it.

        Raises:
          ValueError: a place is free.
        """
        for place in places:
            self._used(place)
            self._users[place] -= 1
            if not self._users[place]:
                self._free.append(place)
            self.idle += place in self._kept and self._users[place] == 1

    def _used(self, place: int) -> None:
        if not self._users[place]:
            raise ValueError(f"place {place} is free; only a used one can be shared or dropped")
