"""The padding rule of the routed experts: shares, groups and pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.placement.groups import GroupSplit, divides, working_parts


@st.composite
def splits(draw: st.DrawFn) -> GroupSplit:
    """Widths of whole groups, and parts that give equal even shares."""
    parts = draw(st.integers(1, 12))
    width = draw(st.integers(1, 24).map(lambda groups: 32 * groups).filter(lambda width: divides(width, parts)))
    return GroupSplit(width, parts)


def test_k3_needs_no_padding():
    # Red when whole groups are padded anyway (local_width 416).
    split = GroupSplit(3072, 8)
    assert (split.local_width, split.padding, split.cuts_groups) == (384, 0, False)
    assert split.pieces(7) == ((0, 2688, 384),)


def test_a_share_that_starts_inside_a_group_keeps_its_offset():
    # Red when the second rank's units start at local 0: they would then straddle two scales.
    split = GroupSplit(96, 2)
    assert split.local_width == 64
    assert split.pieces(0) == ((0, 0, 48),)
    assert split.pieces(1) == ((16, 48, 48),)


def test_scales_of_a_cut_group_are_read_by_both_ranks():
    # Red when scale entries are the floor of the piece: rank 0 would miss group 1.
    split = GroupSplit(96, 2)
    assert split.stored_piece(0, 32) == (0, 0, 2)
    assert split.stored_piece(1, 32) == (0, 1, 2)
    assert split.stored_piece(1, 2) == (8, 24, 24)
    assert split.stored_width(32) == 2


@given(splits())
def test_pieces_cover_the_width_once_and_agree_on_groups(split: GroupSplit):
    # Red when the offset inside the group is dropped, or when local_width is that of rank 0 only.
    covered = []
    for rank in range(split.parts):
        for local, start, length in split.pieces(rank):
            assert local % split.group == start % split.group or not split.cuts_groups
            assert local + length <= split.local_width
            covered += range(start, start + length)
    assert covered == list(range(split.width))
    assert not split.cuts_groups or split.local_width % split.group == 0
    assert split.local_width < split.share + 2 * split.group  # never more than a group at either end


@pytest.mark.parametrize(("width", "parts"), [(3072, 7), (64, 64), (96, 0)])
def test_shares_that_are_unequal_or_odd_are_refused(width: int, parts: int):
    # Red when evenness is not asked for: 64 over 64 cuts a byte.
    with pytest.raises(ValueError, match="parts that work: 1, 2"):
        GroupSplit(width, parts)


def test_working_parts():
    # Red when 5 (unequal) or 32 (odd share of 1) is offered.
    assert working_parts(32) == (1, 2, 4, 8, 16)
