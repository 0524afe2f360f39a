import pytest

from kimi_jax.engine.limits import EngineLimits, LimitsError, check_limits

FITTING = {"slots": 4, "pages": 16, "checkpoints": 4, "queue": 1, "page": 8, "chunk": 3, "spacing": 16}


def problems(capacity=32, groups=2, **fields):
    with pytest.raises(LimitsError) as caught:
        check_limits(EngineLimits(**{**FITTING, **fields}), capacity, groups)
    return list(caught.value.problems)


@pytest.mark.parametrize("fields", [{}, {"checkpoints": 0}, {"pages": 8}, {"chunk": 1}])
def test_what_is_accepted(fields):
    check_limits(EngineLimits(**{**FITTING, **fields}), 32, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slots": 0}, "slots = 0; it must be an integer of at least 1"),
        ({"checkpoints": -1}, "checkpoints = -1; it must be an integer of at least 0"),
        ({"chunk": 1.5}, "chunk = 1.5; it must be an integer of at least 1"),
        ({"queue": True}, "queue = True; it must be an integer of at least 1"),
        ({"slots": 5}, "slots = 5 over 2 groups of devices; take 6"),
        ({"checkpoints": 3}, "checkpoints = 3 over 2 groups of devices; take 4"),
        ({"spacing": 20}, "spacing = 20; it must be a multiple of page = 8, such as 24"),
        ({"page": 5, "spacing": 5}, "32 tokens, which pages of 5 do not divide; load with max_seq_len=30"),
        (
            {"pages": 6},
            "3 pages of 8 hold 24 tokens and one sequence may have 32; give pages=8 or load with max_seq_len=24",
        ),
    ],
)
def test_what_is_refused(fields, said):
    assert said in problems(**fields)[0]


def test_all_at_once():
    assert len(problems(slots=5, pages=5, checkpoints=1, spacing=3)) == 5  # red when the first one ends the check
    assert len(problems(slots=0, page=-1, queue=None)) == 3
