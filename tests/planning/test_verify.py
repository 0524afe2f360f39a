"""Speculative steps in a plan: what a block costs, what it yields, and the best length; the full-size loop lowered."""

from dataclasses import replace
from itertools import pairwise

import pytest

import kimi_jax
from kimi_jax.draft.config import DraftError
from kimi_jax.draft.published import named_draft
from kimi_jax.planning.ask import changed
from kimi_jax.planning.drafted_step import drafted_step
from kimi_jax.planning.lower import lower_step
from kimi_jax.planning.plan import PlanError
from kimi_jax.planning.speculation import expected_tokens, speculate
from kimi_jax.planning.step_program import CompileError

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def drafted():
    return kimi_jax.plan("k3", "tp8-lean", "mi355x", 8192, draft="k3-mla", acceptance=[0.73])


def test_published_lengths():
    # Red when the token after the last kept draft is not counted, or chances are not multiplied.
    reached = (0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26)
    chances = [after / before for before, after in pairwise((1.0, *reached))]
    assert expected_tokens(chances) == pytest.approx(4.597, abs=0.02)
    assert expected_tokens([1.0] * 7) == 8 and expected_tokens([]) == 1


def test_the_best_length_falls_with_the_fixed_costs(drafted):
    # Red when the union of the experts does not grow with the rows, or launches and exchanges with the length.
    best = []
    for batch, launch, link in ((1, 3.9, 6.3), (1, 0.2, 1.0), (8, 0.5, 3.0), (8, 0.0, 0.0)):
        device = replace(drafted.ask.device, launch_latency=launch * 1e-6, link_latency=link * 1e-6)
        best.append(speculate(changed(drafted.ask, batch=batch, device=device), [0.73]).best().drafts)
    assert best == sorted(best, reverse=True) and (best[0], best[1], best[-1]) == (7, 4, 2)


def test_states_are_written_once_however_long_a_block_is(drafted):
    # Red when a row of a block costs a state: 434 MB of one request over all devices, and no more for eight rows.
    found = drafted.speculation
    sizes = [{part.work.part: part.work.bytes for part in each.bound.parts} for each in found.lengths]
    assert {size["kda_state"] for size in sizes[1:]} == {1.5 * sizes[0]["kda_state"]}
    assert found.state_bytes * 8 == pytest.approx(434.1e6, rel=0.05)
    assert found.record_bytes * 8 < 0.04 * 8 * found.state_bytes * 8
    assert sizes[7]["routed_experts"] == pytest.approx(sizes[0]["routed_experts"] * 120.3 / 16, rel=1e-3)


def test_the_plan_says_it(drafted):
    # Red when the table or the JSON forgets a length.
    shown, told = str(drafted), drafted.to_json()["speculation"]
    assert "drafted tokens of a step" in shown and "best: " in shown
    assert [each["drafts"] for each in told["lengths"]] == list(range(8))
    assert told["best"][0]["speed"] == max(each["speeds"][0] for each in told["lengths"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"acceptance": [0.5]}, "without a draft"),
        ({"draft": "k3-mla", "acceptance": [0.5] * 8}, "give one for all, or 1 to 7"),
        ({"draft": "k3-mla", "acceptance": [1.5]}, "1.5 is no chance"),
    ],
)
def test_tables_that_cannot_be_used(options, said):
    # Red when a table is cut or stretched in silence.
    with pytest.raises(PlanError, match=said):
        kimi_jax.plan("k3", "tp8", **options)


def test_a_draft_and_its_phase_belong_together(tmp_path):
    # Red when a draft is dropped without a word, or a verification runs without one.
    with pytest.raises(CompileError, match="without a draft"):
        lower_step("k3", phase="verify", context=64)
    with pytest.raises(CompileError, match="only 'verify' runs one"):
        lower_step("k3", phase="decode", context=64, draft="k3-mla")
    with pytest.raises(DraftError, match="known: k3-mla"):
        named_draft(tmp_path / "nothing")


@pytest.mark.slow
def test_the_full_size_loop_keeps_its_plan():
    # Red when a cache or a draft's rows are not donated, a parameter is not passed, or a step has a collective that is not planned.
    found = lower_step("k3", "tp8", "mi355x", "verify", LIMIT, draft="k3-mla")
    assert found.problems == []
    planned = drafted_step(found.plan.ask, 7, LIMIT - 8).collectives
    written = found.to_json()["collectives"]
    for kind in ("all-reduce", "all-gather"):
        assert sum(each["count"] for each in written if each["kind"] == kind) == sum(
            each.count for each in planned if each.kind == kind and each.participants > 1
        )
    assert sum(each["count"] * each["bytes"] for each in written if each["kind"] == "all-reduce") == pytest.approx(
        sum(each.count * each.bytes for each in planned if each.kind == "all-reduce")
    )
