"""Bounds of made-up steps on made-up devices: what counts, what is unknown, and the busiest device."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.device import load_device
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.roofline import Collective, Work, bound, expected_busiest, product_flops

DEVICE = replace(
    load_device("mi355x"),
    hbm_bandwidth=1e9,
    link_bandwidth=1e8,
    link_latency=1e-3,
    launch_latency=1e-4,
    peaks=(("fp8", 4e9), ("bf16", 2e9), ("fp32", 1e9)),
)
READ = Work("read", 3e9, (("bf16", 2e9),), launches=10)
COMPUTE = Work("compute", 1e9, (("bf16", 4e9), ("fp32", 1e9)))


def test_parts_overlap_in_the_bound_and_follow_one_another_in_the_model():
    # Red when the bound adds the parts up, or the model overlaps them.
    found = bound([READ, COMPUTE], [], DEVICE)
    assert [part.seconds for part in found.parts] == pytest.approx([3.0, 3.0])
    assert (found.lower, found.by) == (pytest.approx(4.0), "memory")
    assert found.modelled == pytest.approx(3.0 + 3.0 + 10 * 1e-4)
    assert dict(found.flops) == {"bf16": 6e9, "fp32": 1e9}


def test_arithmetic_of_several_dtypes_adds_up():
    # Red when only the largest dtype counts.
    found = bound([Work("x", 1.0, (("bf16", 4e9), ("fp32", 3e9), ("fp8", 4e9)))], [], DEVICE)
    assert (found.lower, found.by) == (pytest.approx(2 + 3 + 1), "arithmetic")


def test_what_may_stay_on_chip_is_not_in_the_bound():
    # Red when cached bytes raise the lower bound, or the model forgets them.
    found = bound([READ, Work("near", 9e9, on_chip=True)], [], DEVICE)
    assert found.lower == pytest.approx(3.0) and found.bytes == 3e9
    assert found.modelled == pytest.approx(3.0 + 9.0 + 10 * 1e-4)


@pytest.mark.parametrize(("kind", "sent"), [("all-reduce", 1.5e6), ("all-gather", 0.75e6), ("reduce-scatter", 0.75e6)])
def test_collectives(kind, sent):
    # Red when an all-reduce counts one round, a latency counts once, or the array is counted per participant.
    each = Collective("x", kind, 10, 1e5, 4)
    assert each.sent == pytest.approx(sent)
    found = bound([READ], [each], DEVICE)
    assert found.collectives == 10
    assert found.exchange_seconds == pytest.approx(10 * 1e-3 + sent / 1e8)


def test_one_participant_exchanges_nothing():
    # Red when a collective of an axis that is whole costs time.
    found = bound([READ], [Collective("x", "all-reduce", 10, 1e5, 1)], DEVICE)
    assert found.exchanges == () and found.collectives == 0


def test_links_can_be_the_bound():
    # Red when sent bytes are left out of the bound.
    found = bound([READ], [Collective("x", "all-gather", 1, 1e9, 2)], DEVICE)
    assert (found.lower, found.by) == (pytest.approx(5.0), "links")


def test_unknown_numbers_are_named_and_left_out():
    # Red when an unknown number counts as zero without being named, or hides what is known.
    exchange = [Collective("x", "all-reduce", 10, 1e5, 4)]
    found = bound([READ], exchange, replace(DEVICE, link_latency=None, launch_latency=None))
    assert found.unknown == ("link_latency", "launch_latency")
    assert found.exchange_seconds is None and found.launch_seconds is None
    assert found.modelled == found.lower == pytest.approx(3.0)
    blind = bound([READ], exchange, replace(DEVICE, hbm_bandwidth=None, peaks=()))
    assert (blind.lower, blind.modelled, blind.by) == (None, None, None)
    assert {"hbm_bandwidth", "peak.bf16"} <= set(blind.unknown)
    assert blind.bytes == 3e9


def test_a_product_counts_the_share_of_one_device():
    # Red when the whole weight is counted, padding is not, or packed codes run at their own peak.
    layout = Layout("cut", mesh={"tensor": 4}, axes={"ffn": "tensor"})
    weight = ArraySpec((64, 32), np.float32, ("ffn", None))
    assert product_flops(weight, layout, 3) == ("fp32", 2 * 16 * 32 * 3)
    assert product_flops(ArraySpec((8, 8), np.uint8, (None, None)), layout, 1)[0] == "bf16"


def test_the_busiest_of_several_shares_is_what_chance_makes_it():
    # Red when the expectation is off: compared with 4,000 draws of 16 of 896 items in 8 shares.
    draw = random.Random(5)
    most = [max(np.bincount([item // 112 for item in draw.sample(range(896), 16)])) for _ in range(4000)]
    assert expected_busiest(16, 8, 112) * 2 == pytest.approx(np.mean(most), rel=0.06)
    assert expected_busiest(896, 8, 112) == pytest.approx(1.0)
    assert expected_busiest(5, 1, 896) == 1.0


@given(st.floats(0.1, 896), st.sampled_from([1, 2, 4, 8]))
def test_the_busiest_is_between_average_and_all(drawn, parts):
    # Red when a spread below one or above the number of shares comes out.
    spread = expected_busiest(drawn, parts, 896 // parts)
    assert 1.0 <= spread <= parts * max(1.0, 1.0 / drawn) + 1e-9


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e15)), min_size=1, max_size=6))
def test_no_model_is_faster_than_the_bound(parts):
    # Red when the bound counts something that the model does not.
    work = [Work(str(i), moved, (("bf16", flops),)) for i, (moved, flops) in enumerate(parts)]
    found = bound(work, [Collective("x", "all-reduce", 3, 1e6, 8)], DEVICE)
    assert found.modelled >= found.lower * (1 - 1e-9)
