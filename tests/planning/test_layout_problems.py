"""Layouts that cannot be: one message with everything wrong, and what would work."""

import pytest

import kimi_jax
from kimi_jax.placement.layout import Layout, LayoutError
from kimi_jax.planning.plan import PlanError

TP8 = {"heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor", "vocab": "tensor"}


def refusal(layout, **options) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        kimi_jax.plan("k3", layout, context=64, **options)
    return caught.value


def tensor(size: int, axes: dict[str, str] = TP8, **options) -> Layout:
    return Layout(f"tp{size}", mesh={"tensor": size}, axes=axes, **options)


def test_five_devices():
    # Red when one axis hides another, or the sizes that work are not named.
    error = refusal(tensor(5))
    found = {line.split(" over ")[0] for line in error.problems}
    assert found == {"heads = 96", "ffn = 33792", "ffn = 6144", "expert_ffn = 3072"}
    assert "Sizes that work for tensor: 1, 2, 4, 8, 16, 32." in error.hint
    assert 'Or map ffn, heads, expert_ffn to "" to keep them whole.' in error.hint


def test_a_packed_byte():
    # Red when an odd share of the experts is accepted.
    (line,) = refusal(tensor(1024, {"expert_ffn": "tensor"})).problems
    assert "a share of 3 is odd, which cuts a packed byte" in line


def test_a_cut_group_under_strict_and_padded_without():
    # Red when strict is ignored, or padding is refused or not counted.
    (line,) = refusal(tensor(64, {"expert_ffn": "tensor"}, strict=True)).problems
    assert "a share of 48 cuts a group of 32, and the layout is strict" in line
    plan = kimi_jax.plan("k3", tensor(64, {"expert_ffn": "tensor"}), context=64)
    routed = plan.sizes.weights["routed"]
    assert routed.padding == routed.per_device - routed.whole // 64 > 0


def test_one_mesh_axis_over_two_dims():
    # Red when the cache is not part of the check.
    error = refusal(tensor(8, {**TP8, "embed": "tensor"}, cache={"sequence": "tensor"}))
    assert any("mesh axis tensor would cut both heads and embed" in line for line in error.problems)


def test_a_faulty_file_and_arrays_it_cannot_place_are_one_message(tmp_path):
    # Red when what is wrong in the file hides what the arrays say, or the other way round.
    path = tmp_path / "odd.toml"
    path.write_text(
        """
        desciption = "typo"
        [mesh]
        tensor = 5
        [axes]
        heads = ["tensor", "tensor"]
        vocabulary = "tensor"
        ffn = "tensro"
        expert_ffn = "tensor"
        expert_latent = "tensor"
        """
    )
    error = refusal(path)
    text = str(error)
    for piece in (
        'no key "desciption"; did you mean "description"?',
        '"vocabulary" is no named axis',
        '[mesh] has no axis "tensro"; did you mean "tensor"?',
        "names one mesh axis twice",
        "expert_latent (contraction side of the routed experts) is never cut",
        "heads = 96 over tensor = 5",
        "expert_ffn = 3072 over tensor = 5",
        "Sizes that work for tensor: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48.",
        "Or map heads, expert_ffn to",
    ):
        assert piece in text
    assert text.startswith('Layout "odd" does not fit k3 (')


def test_an_unknown_layout_names_the_nearest():
    # Red when a missing file is not said as one.
    assert 'did you mean "tp8"' in str(refusal("tp88"))


def test_options_are_refused_together():
    # Red when the first wrong option hides the others.
    with pytest.raises(PlanError) as caught:
        kimi_jax.plan(
            "k3",
            "tp8",
            context=1 << 21,
            batch=0,
            kv_dtype="int3",
            fp8="some",
            vision="twice",
            draft="nobody",
            prefill_chunk=0,
            memory_fraction=2,
        )
    assert len(caught.value.problems) == 8
    for piece in ("context = 2,097,152", "batch = 0", "'int3'", "'some'", "'twice'", "k3-mla", "prefill_chunk", "= 2"):
        assert piece in str(caught.value)


def test_a_draft_of_another_width_is_refused(k3_tiny):
    # Red when the draft is counted beside any target.
    with pytest.raises(PlanError, match="the draft reads hidden vectors of 7168"):
        kimi_jax.plan(k3_tiny, "single", "cpu", draft="k3-mla")
