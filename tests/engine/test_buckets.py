import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.engine.buckets import bucket, prefill_calls


class TestBucket:
    @pytest.mark.parametrize(
        ("size", "largest", "found"),
        [
            (0, 512, 16),
            (1, 512, 16),
            (16, 512, 16),
            (17, 512, 64),
            (65, 512, 256),
            (257, 512, 512),
            (512, 512, 512),
            (3, 8, 8),
        ],
    )
    def test_examples(self, size, largest, found):
        assert bucket(size, largest) == found

    @given(st.integers(0, 100_000), st.integers(1, 100_000))
    def test_it_holds_the_size_and_there_are_few(self, size, largest):
        if size > largest:
            with pytest.raises(ValueError, match=f"{size} does not fit the largest bucket {largest}"):
                bucket(size, largest)
            return
        found = bucket(size, largest)
        assert size <= found <= largest
        assert found == largest or found in {16 * 4**power for power in range(9)}
        assert found <= max(16, 4 * size)  # red when the factor grows


class TestPrefillCalls:
    @pytest.mark.parametrize(
        ("remaining", "chunk", "calls"),
        [
            ([5], 8, [[5]]),
            ([8], 8, [[8]]),
            ([9], 8, [[1], [8]]),
            ([20, 3, 0], 8, [[8, 0, 0], [4, 0, 0], [8, 3, 0]]),
            ([0, 0], 8, [[0, 0]]),
        ],
    )
    def test_examples(self, remaining, chunk, calls):
        assert prefill_calls(remaining, chunk) == calls

    @given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 64))
    def test_every_token_runs_once_and_all_prompts_end_together(self, remaining, chunk):
        calls = prefill_calls(remaining, chunk)
        assert [sum(row) for row in zip(*calls, strict=True)] == remaining
        assert all(0 <= tokens <= chunk for call in calls for tokens in call)
        # red when a short prompt ends early: its first drawn id would come from another row's call
        assert all(last > 0 for last, tokens in zip(calls[-1], remaining, strict=True) if tokens)
        assert len(calls) == max(1, *(-(-tokens // chunk) for tokens in remaining))  # red with a call for nothing
