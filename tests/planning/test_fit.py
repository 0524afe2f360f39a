"""Does it fit: what is left, how much more would fit, and the smallest change, all by the planner itself."""

import pytest

import kimi_jax
from kimi_jax.planning.ask import changed
from kimi_jax.planning.sizes import sizes


@pytest.mark.parametrize("layout", ["tp8", "tp8-lean", "tp8-dcp8"])
def test_what_still_fits_is_exact(layout):
    # Red when scratch is counted per sequence, or a bound is off by one.
    plan = kimi_jax.plan("k3", layout, context=1 << 17, batch=3)
    assert plan.fit.fits and plan.fit.left == plan.fit.usable - plan.fit.need
    ask, fit = plan.ask, plan.fit
    assert sizes(changed(ask, batch=fit.sequences)).device_bytes <= fit.usable
    assert sizes(changed(ask, batch=fit.sequences + 1)).device_bytes > fit.usable
    step = ask.layout.parts("sequence")
    assert sizes(changed(ask, context=fit.longest_context)).device_bytes <= fit.usable
    assert sizes(changed(ask, context=fit.longest_context + step)).device_bytes > fit.usable


def test_the_published_plan_fits_with_what_is_left(published):
    # Red when usable is the whole memory, or the answer ignores it.
    fit = published.fit
    assert fit.fits and fit.tried == () and fit.smallest is None
    assert (fit.capacity, fit.usable) == (288 << 30, int(0.93 * (288 << 30)))
    assert fit.sequences == 5
    assert "Fits: yes." in str(published)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"batch": 4, "kv_dtype": "bfloat16"}, "--kv-dtype fp8"),
        ({"batch": 8, "kv_dtype": "bfloat16"}, "--layout tp8-dcp8"),
        ({"batch": 6}, "--layout tp8-lean"),
    ],
)
def test_the_smallest_change(options, change):
    # Red when the order of the changes is not kept, or a change is not tried on the ask itself.
    plan = kimi_jax.plan("k3", "tp8", **options)
    assert not plan.fit.fits
    assert plan.fit.smallest.change.options == change
    assert [tried.fits for tried in plan.fit.tried] == [False] * (len(plan.fit.tried) - 1) + [True]
    again = kimi_jax.plan("k3", **{"layout": "tp8", **options, **_as_options(change)})
    assert again.fit.fits and again.fit.need == plan.fit.smallest.need


def _as_options(text: str) -> dict[str, str]:
    words = text.split()
    names = {"--kv-dtype": "kv_dtype", "--layout": "layout", "--fp8": "fp8"}
    return {names[flag]: value for flag, value in zip(words[::2], words[1::2], strict=True)}


def test_changes_are_combined_when_none_does_alone():
    # Red when pairs are not tried, or the weights of a smaller device are called a fit.
    plan = kimi_jax.plan("k3", "tp8-dcp8", batch=46, kv_dtype="bfloat16")
    assert not plan.fit.fits
    smallest = plan.fit.smallest
    assert smallest.fits and "," in smallest.change.what
    assert smallest.change.ask.context == 1 << 20 and smallest.change.ask.batch == 46
    assert "Smallest change that fits" in str(plan)


def test_what_a_device_cannot_multiply_is_not_proposed():
    # Red when FP8 weights are proposed for a device with the other form of FP8, or held back from one without.
    tried = kimi_jax.plan("k3", "tp8", "mi300x", context=1 << 17).fit.tried
    assert tried and not any("--fp8" in one.change.options for one in tried)


def test_more_devices_when_nothing_else_does():
    # Red when the planner gives up instead of naming the devices that it takes.
    plan = kimi_jax.plan("k3", "tp8", "h200", context=1 << 17)
    assert plan.fit.smallest.change.what == "16 devices"
    single = kimi_jax.plan("k3", "single", context=1 << 17)
    assert single.fit.smallest.change.options.startswith("--layout ")
    assert single.fit.smallest.change.ask.layout.devices == 8


def test_fewer_tokens_or_sequences_come_last():
    # Red when the request is cut while a change that keeps it would do, or before all changes were tried together.
    plan = kimi_jax.plan("k3", "tp8", batch=128, kv_dtype="bfloat16")
    *before, last = [tried.change for tried in plan.fit.tried]
    assert last.what == "fewer tokens per sequence" and last.options == f"--context {plan.fit.longest_context}"
    assert len(before) == 2**5 - 1 and all(
        (change.ask.context, change.ask.batch) == (1 << 20, 128) for change in before
    )
    assert [change.options for change in before[:5]] == [
        "--kv-dtype fp8",
        "--prefill-chunk 2048",
        "--layout tp8-lean",
        "--layout tp8-dcp8",
        "--fp8 ptpc",
    ]


def test_unknown_memory_is_no_answer():
    # Red when an unknown capacity counts as none or as endless.
    plan = kimi_jax.plan("k3", "single", "cpu", context=64)
    assert plan.fit.fits is None and plan.fit.sequences is None
    assert plan.to_json()["memory"]["percent"] is None
    assert "Fits: unknown" in str(plan)
