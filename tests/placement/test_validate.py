"""A layout held against arrays: every problem, one line per axis, and the sizes that would work."""

import numpy as np
import pytest

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout, LayoutError, load_layout, validate


def problems(layout: Layout, **arrays: ArraySpec) -> tuple[str, ...]:
    with pytest.raises(LayoutError) as caught:
        validate(layout, arrays)
    return caught.value.problems


def bytes_spec(shape: tuple[int, ...], axes: tuple, logical: tuple[int, ...] = ()) -> ArraySpec:
    return ArraySpec(shape, np.uint8, axes, logical)


def tensor(size: int, *axes: str, **options) -> Layout:
    return Layout(f"tp{size}", mesh={"tensor": size}, axes=dict.fromkeys(axes, "tensor"), **options)


K3 = {
    "q_proj": bytes_spec((12288, 7168), ("heads", "embed"), (96, 7168)),
    "w1.weight_packed": bytes_spec((3072, 1792), ("expert_ffn", "expert_latent"), (3072, 3584)),
    "w2.weight_packed": bytes_spec((3584, 1536), ("expert_latent", "expert_ffn"), (3584, 3072)),
    "w2.weight_scale": bytes_spec((3584, 96), ("expert_latent", "expert_ffn"), (3584, 3072)),
    "lm_head": bytes_spec((163840, 7168), ("vocab", "embed")),
    "routed_expert_down_proj": bytes_spec((3584, 7168), ("latent", "embed")),
    "q_a_proj": bytes_spec((1536, 7168), ("q_lora", "embed")),
    "gate": bytes_spec((896, 7168), ("router_expert", "embed")),
    "gate_proj": bytes_spec((33792, 7168), ("ffn", "embed")),
    "experts": bytes_spec((896, 3072, 1792), ("expert", None, "expert_latent"), (896, 3072, 3584)),
}


@pytest.mark.parametrize("name", ["single", "tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4", "tp8-dcp8", "sp2-tp4"])
def test_shipped_layouts_fit_k3(name: str):
    # Red when expert_ffn = 3072 over 8 is called a cut group (384 = 12 * 32), or one width is asked of every axis.
    validate(load_layout(name), K3)


def test_a_size_that_does_not_divide_names_everything():
    # Red when any of tensor, axis, size, mesh axis or the working sizes leaves the message.
    layout = tensor(6, "heads", "vocab")
    with pytest.raises(LayoutError) as caught:
        validate(layout, K3, "Kimi-K3")
    assert str(caught.value) == (
        'Layout "tp6" does not fit Kimi-K3 (1 problem):\n'
        "  vocab = 163840 over tensor = 6 (lm_head): does not divide; "
        "sizes that work: 1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64\n"
        'Sizes that work for tensor: 1, 2, 4, 8, 16, 32. Or map vocab to "" to keep it whole.'
    )


def test_half_a_million_tensors_give_one_line_per_axis():
    # Red when problems are listed per tensor.
    spec = K3["q_proj"]
    found = problems(tensor(5, "heads"), **{f"layers.{i}.q_proj": spec for i in range(5000)})
    assert found == (
        "heads = 96 over tensor = 5 (layers.0.q_proj and 4999 more): does not divide; "
        "sizes that work: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48",
    )


def test_several_mesh_axes_are_named_with_their_product():
    # Red when only the first mesh axis of a list is counted.
    layout = Layout("mixed", mesh={"tensor": 4, "expert": 5}, axes={"heads": ["tensor", "expert"]})
    (line,) = problems(layout, q=K3["q_proj"])
    assert line.startswith("heads = 96 over tensor 4 x expert 5 = 20 (q): does not divide")


def test_one_mesh_axis_cannot_cut_two_dims():
    # Red when the collision is left to JAX, or only looked for between equal names.
    layout = tensor(8, "heads", "ffn")
    (line,) = problems(layout, odd=bytes_spec((64, 64), ("heads", "ffn")))
    assert line == 'odd: mesh axis tensor would cut both heads and ffn; map one of them to ""'
    (line,) = problems(layout, odd=bytes_spec((64, 64), ("heads", "heads")))
    assert "would cut both heads and heads" in line


def test_a_cache_axis_collides_too():
    # Red when the cache section is not part of the check.
    (line,) = problems(load_layout("tp8-dcp8"), cache=bytes_spec((64, 96), ("sequence", "heads")))
    assert "would cut both sequence and heads" in line


def test_unknown_axes_of_arrays_are_named_once():
    # Red when an unknown axis counts as replicated.
    found = problems(tensor(2, "heads"), a=bytes_spec((4,), ("hed",)), b=bytes_spec((8,), ("hed",)))
    assert found == ('a and 1 more: "hed" is no named axis; did you mean "heads"?',)


@pytest.mark.parametrize(
    ("parts", "spec", "reason"),
    [
        (32, bytes_spec((48,), ("latent",), (96,)), "a share of 3 cuts a packed byte"),
        (2, bytes_spec((3,), ("latent",), (96,)), "a share of 48 cuts a group of 32"),
        (32, bytes_spec((96,), ("expert_ffn",)), "a share of 3 is odd, which cuts a packed byte"),
    ],
)
def test_cuts_inside_a_byte_or_a_group(parts: int, spec: ArraySpec, reason: str):
    # Red when only the units must divide.
    (line,) = problems(tensor(parts, "latent", "expert_ffn"), w=spec)
    assert reason in line


def test_a_cut_group_is_padded_or_refused_under_strict():
    # Red when strict is ignored, or when padding is refused without it.
    w2 = bytes_spec((8, 48), ("expert_latent", "expert_ffn"), (8, 96))
    validate(tensor(2, "expert_ffn"), {"w2": w2})
    (line,) = problems(tensor(2, "expert_ffn", strict=True), w2=w2)
    assert line.endswith("a share of 48 cuts a group of 32, and the layout is strict; sizes that work: 1, 3")


def test_the_key_value_latent_is_cut_only_as_a_whole():
    # Red when 576 rows and a 512-wide norm of one latent are cut at different places.
    layout = tensor(8, "kv_lora")
    rows, norm = bytes_spec((576, 64), ("kv_lora", "embed")), bytes_spec((512,), ("kv_lora",))
    validate(layout, {"kv_a_proj": rows})
    (line,) = problems(layout, kv_a_proj=rows, kv_a_layernorm=norm)
    assert line == (
        "kv_lora over tensor = 8 is cut only as a whole, but its width differs: 576 in kv_a_proj, 512 in kv_a_layernorm"
    )


def test_all_problems_come_at_once():
    # Red when the first kind of problem hides the others.
    found = problems(
        tensor(7, "heads", "vocab", "ffn"),
        **K3,
        odd=bytes_spec((7, 7), ("heads", "ffn")),
        typo=bytes_spec((7,), ("vocabulary",)),
    )
    text = "\n".join(found)
    for piece in ("heads = 96", "vocab = 163840", "ffn = 33792", "would cut both heads and ffn", '"vocabulary"'):
        assert piece in text
