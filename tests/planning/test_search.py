"""Ranking the shipped layouts: order, refusals, and why the first wins."""

import pytest

import kimi_jax
from kimi_jax.placement.files import shipped_names
from kimi_jax.planning.search import SearchError, search


@pytest.mark.parametrize("goal", ["latency", "throughput", "longest-context"])
def test_every_shipped_layout_is_ranked_or_refused(goal):
    # Red when a layout is left out, the order is turned round, or no reason is given.
    plan = kimi_jax.plan("k3", "tp8", context=1 << 17, goal=goal)
    found = plan.ranking
    assert sorted([*(each.layout for each in found.ranked), *(name for name, _ in found.refused)]) == shipped_names(
        "layouts"
    )
    values = [each.value for each in found.ranked]
    assert values == sorted(values, reverse=goal != "latency")
    assert {name for name, _ in found.refused} == {"single", "dp2-tp4"}  # 1,560 and 390 GB on a device
    assert all("GiB" in why for _, why in found.refused)
    assert found.why and found.ranked[0].layout in found.why[0]


def test_long_contexts_want_a_split_sequence():
    # Red when replicated rows are not seen as the limit.
    ask = kimi_jax.plan("k3", "tp8", context=1 << 17).ask
    assert search(ask, "longest-context").ranked[0].layout == "tp8-dcp8"
    assert search(ask, "throughput").ranked[0].layout == "tp8-dcp8"


def test_the_values_are_those_of_a_plan():
    # Red when a candidate is measured otherwise than a plan of its layout.
    found = search(kimi_jax.plan("k3", "tp8", context=4096, batch=2).ask, "latency")
    for each in found.ranked:
        plan = kimi_jax.plan("k3", each.layout, context=4096, batch=2)
        (call,) = (call for call in plan.calls if call.kind == "decode" and call.context)
        assert each.value == call.bound.modelled and each.device_bytes == plan.fit.need


def test_an_unknown_goal_and_a_device_that_holds_nothing():
    # Red when nothing fits and the list is empty without a word.
    ask = kimi_jax.plan("k3", "single", "cpu", context=64).ask
    with pytest.raises(SearchError, match="known: latency, throughput, longest-context"):
        search(ask, "beauty")
    with pytest.raises(SearchError, match="the memory of cpu is unknown"):
        search(ask, "latency")
