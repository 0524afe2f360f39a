"""What a step costs against what it may: the difference names the part and the operation."""

import pytest

from kimi_jax.placement.audit import Audit, Collective, Copy, Launches, Memory, Reader
from kimi_jax.placement.budget import Budget, BudgetError, load_budget, over_budget
from kimi_jax.placement.codeobjects import Kernel
from kimi_jax.placement.files import shipped_names
from kimi_jax.placement.moved import Again, Moved

FOUND = Audit(
    Memory(10, 20, 5, 100),
    (),
    (),
    (Collective("all-reduce", 64, 8, "kda"), Collective("all-gather", 512, 8, "mla")),
    (Copy(2_000_000, "mla", "copy.7", "cache"),),
    (Reader("params['w']", 4_000_000, 8_000_000, "moe", "fusion.1", "fusion", "convert"),),
    Launches(10, 4, 1),
    Moved(100.0, 10.0, (("moe", 110.0),), (Again("params['w']", 8.0, ("up", "down")),), 100.0),
)
KERNELS = [Kernel("slow", "gfx950", 256, 0, 7, 64, 0), Kernel("fine", "gfx950", 90, 0, 0, 0, 0)]
KEPT = {
    "temp_bytes": 100,
    "launches": 10,
    "inner_launches": 4,
    "large_copies": 1,
    "weight_readers": 1,
    "spilling_kernels": 1,
}
COLLECTIVES = {("kda", "all-reduce"): 1, ("mla", "all-gather"): 1}


def test_a_step_may_cost_exactly_its_budget():
    # Red when a limit is the first number that is too much.
    assert over_budget(FOUND, KERNELS, Budget("b", "", KEPT, COLLECTIVES)) == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("temp_bytes", "temp_bytes: 100, budget 99"),
        ("launches", "launches: 10, budget 9"),
        ("large_copies", "large_copies: 1, budget 0 (mla: cache, 2,000,000 bytes)"),
        ("weight_readers", "weight_readers: 1, budget 0 (moe: convert reads params['w'])"),
        ("spilling_kernels", "spilling_kernels: 1, budget 0 (slow: 7 registers)"),
    ],
)
def test_one_too_many_is_named(key, said):
    # Red when a number is not compared, or its line does not name what costs it.
    assert over_budget(FOUND, KERNELS, Budget("b", "", {**KEPT, key: KEPT[key] - 1}, COLLECTIVES)) == [said]


def test_bytes_over_those_that_must_move():
    # Red when the ratio is not compared, or the argument that is read again is not named.
    budget = Budget("b", "", {**KEPT, "moved_ratio": 1.1}, COLLECTIVES)
    assert over_budget(FOUND, KERNELS, budget) == []
    budget = Budget("b", "", {**KEPT, "moved_ratio": 1.09}, COLLECTIVES)
    assert over_budget(FOUND, KERNELS, budget) == [
        "moved_ratio: 1.1000, budget 1.09 (params['w'] read by up, down: 8 bytes more)"
    ]


def test_a_collective_that_is_not_named_is_not_allowed():
    # Red when only the named collectives are compared: an accidental gather would pass.
    budget = Budget("b", "", KEPT, {("kda", "all-reduce"): 1})
    assert over_budget(FOUND, KERNELS, budget) == ["mla: all-gather 1, budget 0 (of 512 bytes)"]


def test_all_that_is_wrong_in_a_file_comes_at_once(tmp_path):
    # Red when the first problem ends the reading.
    path = tmp_path / "b.toml"
    path.write_text(
        'temp_byte = 1\nlaunches = "many"\nmoved_ratio = "1"\n[collectives.kda]\nall-reduced = 1\nall-gather = true\n'
    )
    with pytest.raises(BudgetError) as caught:
        load_budget(path)
    assert len(caught.value.problems) == 5
    assert 'did you mean "temp_bytes"' in str(caught.value)
    assert 'did you mean "all-reduce"' in str(caught.value)


@pytest.mark.parametrize("name", shipped_names("budgets"))
def test_shipped_budgets_can_be_read(name):
    # Red when a shipped file has a key that is not known.
    assert load_budget(name).collectives
