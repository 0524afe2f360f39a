"""Pictures shared out over calls and packs, and their rows kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.media.packing import pack, plan_calls
from kimi_jax.media.picture import Picture
from kimi_jax.media.rows_cache import RowsCache

BUCKETS = (16, 64, 256)


@given(st.lists(st.integers(1, 64).map(lambda n: 4 * n), max_size=30), st.integers(1, 8))
def test_every_picture_runs_once_and_fits(counts, packs):
    # red when a picture is lost, runs twice, or a pack is fuller than its bucket
    calls = plan_calls(counts, packs, BUCKETS)
    assert sorted(number for call in calls for part in call.packs for number in part) == list(range(len(counts)))
    for call in calls:
        loads = [sum(counts[number] for number in part) for part in call.packs]
        assert len(loads) == packs
        assert call.bucket == min(bucket for bucket in BUCKETS if bucket >= max(loads))


def test_pictures_are_spread():
    # red when the first device gets everything
    (call,) = plan_calls([16] * 8, 8, BUCKETS)
    assert (call.bucket, sorted(map(len, call.packs))) == (16, [1] * 8)
    (call,) = plan_calls([60, 20, 20, 20], 2, BUCKETS)
    assert (call.bucket, sorted(map(len, call.packs))) == (64, [1, 3])
    assert [call.bucket for call in plan_calls([256, 256, 4], 1, BUCKETS)] == [256, 256, 16]
    assert plan_calls([], 4, BUCKETS) == []
    with pytest.raises(ValueError, match="260 patches, the largest bucket 256"):
        plan_calls([260], 1, BUCKETS)


def test_a_pack():
    # red when the four patches of a token are not together, frames are mixed, or a second picture starts elsewhere
    patches = np.arange(16 * 12, dtype=np.float32).reshape(16, 3, 2, 2)
    one = pack([((1, 4, 2), patches[:8]), ((2, 2, 2), patches[8:])], 32, 12)
    assert one.patches.shape == (32, 12)
    assert (one.patches[:16, 0] / 12).tolist() == [*range(16)]
    assert one.row[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert one.column[:8].tolist() == [0, 1] * 4
    assert one.token.tolist() == [0, 1, 2, 2, 8, 8, 8, 8]
    assert one.first.tolist() == [0] * 8 + [8] * 8 + [0] * 16
    assert one.end.tolist() == [8] * 8 + [16] * 8 + [0] * 16
    assert one.frames.tolist() == [1] * 8 + [2] * 8 + [1] * 16
    wide = pack([((1, 2, 4), patches[:8])], 8, 12)
    assert (wide.patches[:, 0] / 12).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def picture(value: int, tokens: int = 1) -> Picture:
    return Picture(28, 28 * tokens, (1, 2 * tokens, 2), np.full((4 * tokens, 3, 14, 14), value, np.uint8))


def rows_of(pictures: list[Picture]) -> list[np.ndarray]:
    return [np.full((picture.tokens, 2), picture.patches.flat[0], np.float32) for picture in pictures]


def test_rows_are_computed_once():
    # red when a picture that comes twice in one request, or again in the next, runs again
    cache, asked = RowsCache(1000), []

    def compute(pictures):
        asked.append([int(picture.patches.flat[0]) for picture in pictures])
        return rows_of(pictures)

    first = cache.rows([picture(1), picture(2), picture(1)], compute)
    again = cache.rows([picture(2), picture(3)], compute)
    assert asked == [[1, 2], [3]]
    assert [rows[0, 0] for rows in [*first, *again]] == [1, 2, 1, 2, 3]
    assert (cache.hits, cache.misses) == (2, 3)
    cache.rows([picture(1)], lambda pictures: pytest.fail("runs again"))


def test_rows_used_longest_ago_go_first():
    # red when bytes are not bounded, or the newest goes
    cache = RowsCache(3 * 8)
    cache.rows([picture(1), picture(2), picture(3)], rows_of)
    cache.rows([picture(1)], rows_of)
    cache.rows([picture(4)], rows_of)
    assert cache.bytes == 24
    cache.rows([picture(1), picture(3), picture(4)], lambda pictures: pytest.fail("one of them is gone"))
    with pytest.raises(ZeroDivisionError):
        cache.rows([picture(2)], lambda pictures: 1 / 0)
    held = cache.find([picture(1)])
    cache.rows([picture(3), picture(4), picture(6)], rows_of)
    assert cache.find([picture(1)]) and held  # given up, and found as long as somebody holds it
    del held
    assert not cache.find([picture(1)])
    cache.rows([picture(5, 4)], rows_of)  # too large to keep: the others stay
    cache.rows([picture(3), picture(4), picture(6)], lambda pictures: pytest.fail("one of them is gone"))
