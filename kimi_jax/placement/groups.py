"""The padding rule of the routed experts: a rank's share of the inner width, in whole groups of one scale each.

Each of `parts` ranks takes width / parts consecutive units. Units share a scale in groups of 32 (MXFP4), and a share
may begin or end inside a group. The local block is then the rank's share widened outwards to whole groups: a unit keeps
its offset inside its group, so each local group needs exactly one global scale, and the units of a neighbour are zero.
Zero units add nothing to w2 @ situ(w1 x, w3 x), so the sum over ranks is unchanged.

    width 96, 2 parts      group 0          group 1          group 2
    rank 0 (units 0-47)    [0 .. 31]        [32 .. 47, 0]
    rank 1 (units 48-95)                    [0, 48 .. 63]    [64 .. 95]          local_width = 64
"""

from __future__ import annotations

from dataclasses import dataclass

PAD_SCALE = 127  # e8m0 byte of 2**0 (OCP Microscaling Formats v1.0, section 5.4.1); any finite scale would do


@dataclass(frozen=True)
class GroupSplit:
    """How `width` units are cut into `parts` equal shares, padded to whole groups where a group is cut.

    Attributes:
      width: units of the whole dim (K3: 3072).
      parts: ranks that share it.
      group: units that share one scale.

    Raises:
      ValueError: the width cannot be cut into equal, even shares (an odd share would cut a packed byte).
    """

    width: int
    parts: int
    group: int = 32

    def __post_init__(self) -> None:
        if not divides(self.width, self.parts):
            raise ValueError(
                f"{self.width} units cannot be cut into {self.parts} equal even shares; "
                f"parts that work: {', '.join(map(str, working_parts(self.width)))}"
            )

    @property
    def share(self) -> int:
        """Real units of one rank."""
        return self.width // self.parts

    @property
    def cuts_groups(self) -> bool:
        """Whether some group is shared by two ranks, so that the local blocks are padded."""
        return self.parts > 1 and self.share % self.group != 0

    @property
    def local_width(self) -> int:
        """Units of one local block, padding included; the same on every rank."""
        if not self.cuts_groups:
            return self.share
        return self.group * max(self._touched(rank) for rank in range(self.parts))

    @property
    def padding(self) -> int:
        """Units of padding in one local block."""
        return self.local_width - self.share

    def pieces(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(local_start, global_start, length) in units of the real units in the rank's block: always one run."""
        start = rank * self.share
        return ((start % self.group if self.cuts_groups else 0, start, self.share),)

    def stored_width(self, units_per_entry: int = 1) -> int:
        """Stored entries of one local block: units_per_entry is 1 for rows, 2 for packed bytes, 32 for scales."""
        return self.local_width // units_per_entry

    def stored_piece(self, rank: int, units_per_entry: int = 1) -> tuple[int, int, int]:
        """The run of `pieces` in stored entries; an entry with any real unit counts whole (ranks share its scale)."""
        ((local, start, length),) = self.pieces(rank)
        first, last = start // units_per_entry, (start + length - 1) // units_per_entry
        return local // units_per_entry, first, last - first + 1

    def _touched(self, rank: int) -> int:
        """How many global groups hold a unit of the rank."""
        start = rank * self.share
        return (start + self.share - 1) // self.group - start // self.group + 1


def divides(width: int, parts: int) -> bool:
    """Whether width units make `parts` equal shares that cut no packed byte."""
    return parts == 1 or (parts > 0 and width % parts == 0 and (width // parts) % 2 == 0)


def working_parts(width: int, limit: int = 64) -> tuple[int, ...]:
    """Every number of ranks up to `limit` that can share `width` units."""
    return tuple(parts for parts in range(1, limit + 1) if divides(width, parts))
