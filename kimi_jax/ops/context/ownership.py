"""Which device of a group holds which position of a cached sequence, and where (K3.1 Pro notes, section 8.1).

Positions are dealt in turns: ``run`` consecutive ones to each of ``parts`` devices. A device keeps its own in order, without gaps:
its local column grows with the position. Pages need no rule of their own: a table entry covers ``parts`` times the local page.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

Count = int | Int[Array, "..."]


@dataclass(frozen=True)
class Dealt:
    """How positions are dealt.

    Attributes:
      parts: devices that share a sequence.
      run: consecutive positions of one device, the interleave.
    """

    parts: int
    run: int = 1

    @property
    def turn(self) -> int:
        """Positions after which the first device is next again."""
        return self.parts * self.run

    def owner(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """The device that holds a position."""
        return position // self.run % self.parts

    def column(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """Where a position lies among those of its owner."""
        return position // self.turn * self.run + position % self.run

    def position(self, column: Int[Array, "..."], rank: Count) -> Int[Array, "..."]:
        """The position that lies in a column of device ``rank``."""
        return column // self.run * self.turn + rank * self.run + column % self.run

    def held(self, length: Int[Array, "..."], rank: Count) -> Int[Array, "..."]:
        """How many of the first ``length`` positions device ``rank`` holds: its columns up to there."""
        return length // self.turn * self.run + jnp.clip(length % self.turn - rank * self.run, 0, self.run)

    def last(self, position: Int[Array, "..."], rank: Count) -> Int[Array, "..."]:
        """The last column of device ``rank`` that a query at ``position`` sees; -1 where it sees none, as padding does."""
        return self.held(position + 1, rank) - 1

    def most(self, tokens: int) -> int:
        """Most positions that one device holds of any ``tokens`` consecutive ones."""
        return tokens // self.turn * self.run + min(tokens % self.turn, self.run)


def own_rows(
    new: Shaped[Array, "rows tokens ..."],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    dealt: Dealt,
    rank: Count,
) -> tuple[Shaped[Array, "rows most ..."], Int[Array, " rows"], Int[Array, " rows"]]:
    """Of the rows of new tokens those that device ``rank`` holds, side by side.

    Args:
      new: rows of consecutive tokens.
      starts: position of the first token of each sequence.
      counts: real tokens of each; the rest is padding.

    Returns:
      The rows, the column at which the first of them lies, and how many they are; what follows them may be anything.
    """
    first, end = dealt.held(starts, rank), dealt.held(starts + counts, rank)
    column = first[:, None] + jnp.arange(dealt.most(new.shape[1]), dtype=jnp.int32)
    token = jnp.clip(dealt.position(column, rank) - starts[:, None], 0, new.shape[1] - 1)
    # one token is at no other place
    if new.shape[1] > 1:
        new = jnp.take_along_axis(new, token.reshape(*token.shape, *[1] * (new.ndim - 2)), axis=1)
    return new, first, end - first


def own_columns(selected: Int[Array, "*queries k"], dealt: Dealt, rank: Count) -> Int[Array, "*queries k"]:
    """Of chosen positions (ascending, -1 for none) the columns that device ``rank`` holds: ascending, then -1."""
    own = (selected >= 0) & (dealt.owner(selected) == rank)
    none = jnp.iinfo(jnp.int32).max
    columns = jnp.sort(jnp.where(own, dealt.column(selected), none), axis=-1)
    return jnp.where(columns == none, -1, columns)


def in_order(joined: Shaped[Array, "rows parts columns ..."], dealt: Dealt) -> Shaped[Array, "rows positions ..."]:
    """Rows of all devices, each device's in the order of its columns, in the order of positions. ``columns`` are whole runs."""
    rows, parts, columns, *rest = joined.shape
    turns = joined.reshape(rows, parts, columns // dealt.run, dealt.run, *rest)
    return jnp.swapaxes(turns, 1, 2).reshape(rows, parts * columns, *rest)


def is_owned(position: Int[Array, "..."], dealt: Dealt, rank: Count) -> Bool[Array, "..."]:
    """Whether device ``rank`` holds a position; never a negative one."""
    return (position >= 0) & (dealt.owner(position) == rank)
