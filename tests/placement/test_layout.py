"""Layouts: the shipped files, the file format, and what follows from a layout for one array."""

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kimi_jax.placement.axes import AXES, ArraySpec
from kimi_jax.placement.files import sharding_folder
from kimi_jax.placement.layout import Layout, LayoutError, load_layout

SHIPPED = sorted(path.stem for path in (sharding_folder() / "layouts").glob("*.toml"))
TP8 = dict.fromkeys(("heads", "ffn", "expert_ffn", "vocab", "images"), ("tensor",))


def test_the_shipped_layouts_are_the_designed_ones():
    # Red when a file is renamed, an axis is added to tp8, or the expert axis of ep8 and tp4-ep2 is swapped.
    assert {"single", "tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4", "tp8-dcp8", "sp2-tp4"} == set(SHIPPED)
    both = ("tensor", "expert")
    mapped = {name: (dict(load_layout(name).axes), dict(load_layout(name).cache)) for name in SHIPPED}
    assert mapped["single"] == ({}, {})
    assert mapped["tp8"] == (TP8, {})
    assert mapped["tp8-lean"] == (TP8 | dict.fromkeys(("latent", "router_expert", "q_lora"), ("tensor",)), {})
    assert mapped["ep8"] == ({axis: TP8[axis] for axis in TP8 if axis != "expert_ffn"} | {"expert": ("tensor",)}, {})
    assert mapped["tp4-ep2"] == (
        dict.fromkeys(("heads", "ffn", "vocab", "images"), both) | {"expert": ("expert",), "expert_ffn": ("tensor",)},
        {},
    )
    assert mapped["dp2-tp4"] == (TP8 | {"batch": ("data",), "images": ("data", "tensor")}, {"pages": ("data",)})
    assert mapped["tp8-dcp8"] == (TP8, {"sequence": ("tensor",)})
    dealt = {"expert": ("context",), "tokens": ("context",), "images": ("context", "tensor")}
    assert mapped["sp2-tp4"] == (TP8 | dealt, {})


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_layouts_keep_the_hidden_size_whole_and_say_what_they_are(name: str):
    # Red when a shipped file maps embed or has no description.
    layout = load_layout(name)
    assert layout.parts("embed") == 1 and layout.description
    assert layout.devices == (1 if name == "single" else 8)


def test_every_named_axis_is_explained_in_the_format_comment():
    # Red when an axis is added to AXES and not to the comment.
    text = (sharding_folder() / "layouts" / "tp8.toml").read_text()
    words = {word for line in text.splitlines() if line.startswith("#") for word in re.findall(r"\w+", line)}
    assert set(AXES) - words == set()


def test_a_layout_is_a_value():
    # Red when a mapping makes it unhashable, uncopyable, or open to change.
    layout = load_layout("tp4-ep2")
    assert layout == load_layout("tp4-ep2") and hash(layout) == hash(load_layout("tp4-ep2"))
    assert layout == pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout)
    assert load_layout(layout) is layout
    with pytest.raises(TypeError):
        layout.mesh["tensor"] = 3


def test_spec_keeps_the_declared_order_of_mesh_axes():
    # Red when a list of mesh axes is sorted, or a whole dim is left out.
    layout = load_layout("tp4-ep2")
    array = ArraySpec((896, 12288, 7168), np.uint8, ("expert", "heads", None), (896, 96, 7168))
    assert layout.spec(array) == P("expert", ("tensor", "expert"), None)


def test_local_shape_counts_units_not_entries():
    # Red when the size that must divide is the stored one: 96 heads over 64 divides 12288 rows but not the heads.
    rows = ArraySpec((12288, 7168), np.uint16, ("heads", "embed"), (96, 7168))
    assert load_layout("tp8").local_shape(rows) == (1536, 7168)
    with pytest.raises(LayoutError, match="cannot cut heads = 96 into 64"):
        Layout("tp64", mesh={"tensor": 64}, axes={"heads": "tensor"}).local_shape(rows)


def test_group_padding_scales_rows_bytes_and_scales_alike():
    # Red when packed or scale dims are not padded with their own entries per unit, or the padding is per array.
    layout = Layout("cut", mesh={"tensor": 2}, axes={"expert_ffn": "tensor"})
    latent = ("expert_latent", "expert_ffn")
    assert layout.placed_shape(ArraySpec((96, 8), np.uint8, latent[::-1])) == (128, 8)
    assert layout.placed_shape(ArraySpec((8, 48), np.uint8, latent, (8, 96))) == (8, 64)
    assert layout.placed_shape(ArraySpec((8, 3), np.uint8, latent, (8, 96))) == (8, 4)
    assert layout.local_bytes(ArraySpec((8, 48), np.uint8, latent, (8, 96))) == 8 * 32
    assert layout.padding_bytes(ArraySpec((8, 48), np.uint8, latent, (8, 96))) == 8 * (32 - 24)
    assert load_layout("tp8").padding_bytes(ArraySpec((8, 96), np.uint8, latent, (8, 3072))) == 0


def test_strict_refuses_what_it_would_pad():
    # Red when strict is ignored.
    layout = Layout("cut", mesh={"tensor": 2}, axes={"expert_ffn": "tensor"}, strict=True)
    with pytest.raises(LayoutError, match="a share of 48 cuts a group of 32, and the layout is strict"):
        layout.placed_shape(ArraySpec((96,), np.uint8, ("expert_ffn",)))


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path):
    # Red when reading stops at the first problem, or a typo gets no suggestion.
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        strikt = true
        description = 3
        [mesh]
        data = 0
        tensor = 8
        [axes]
        hedas = "tensor"
        vocab = "tensr"
        ffn = ["tensor", "tensor"]
        expert_latent = "tensor"
        latent = 8
        sequence = "tensor"
        [cache]
        batch = "data"
        """
    )
    with pytest.raises(LayoutError) as caught:
        load_layout(path)
    text = str(caught.value)
    assert len(caught.value.problems) == 10
    for piece in (
        'no key "strikt"; did you mean "strict"?',
        "description must be a str",
        "mesh axis data = 0",
        '"hedas" is no named axis; did you mean "heads"?',
        '[mesh] has no axis "tensr"; did you mean "tensor"?',
        "names one mesh axis twice",
        "expert_latent (contraction side of the routed experts) is never cut",
        "latent must be a mesh axis or a list of them, got 8",
        "sequence belongs in [cache], not in [axes]",
        "batch belongs in [axes], not in [cache]",
    ):
        assert piece in text


def test_rows_and_weights_on_one_mesh_axis_are_refused(tmp_path: Path):
    # Red when it is accepted: parts of different sequences are then summed together, and the answers are silently wrong.
    path = tmp_path / "mine.toml"
    path.write_text(
        '[mesh]\ndata = 2\none = 1\n[axes]\nexpert = ["data"]\nvocab = ["one", "data"]\nbatch = ["one", "data"]'
    )
    with pytest.raises(LayoutError) as caught:
        load_layout(path)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f'{name} and batch both lie on mesh axis "data"' for name in ("expert", "vocab")
    ]


def test_names_and_paths_that_lead_nowhere(tmp_path: Path):
    # Red when the nearest name is not offered, or a broken file escapes as another error.
    with pytest.raises(LayoutError, match='No layout is called "tp88"'):
        load_layout("tp88")
    with pytest.raises(LayoutError, match='did you mean "tp8-lean"'):
        load_layout("tp8-leen")
    with pytest.raises(LayoutError, match="there is no such file"):
        load_layout(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[mesh\n")
    with pytest.raises(LayoutError, match="not valid TOML"):
        load_layout(str(tmp_path / "broken.toml"))


def test_an_unknown_named_axis_is_an_error_in_code_too():
    # Red when a typo in a layer means "replicated".
    with pytest.raises(LayoutError, match='did you mean "heads"'):
        load_layout("tp8").parts("head")


def test_array_spec_refuses_dims_that_do_not_fit_together():
    # Red when the length check or the multiple check is dropped.
    with pytest.raises(ValueError, match="one entry per dim"):
        ArraySpec((4, 4), np.uint8, ("heads",))
    with pytest.raises(ValueError, match="96 units cannot fill 100"):
        ArraySpec((100,), np.uint8, ("heads",), (96,))


def test_how_a_sequence_is_dealt_is_read_and_checked(tmp_path: Path):
    # Red when the number is read as a mesh axis or ignored, or a wrong one is reported apart from the other problems.
    path = tmp_path / "mine.toml"
    path.write_text('[mesh]\ntensor = 4\n[axes]\nheads = "tensor"\n[cache]\nsequence = "tensor"\ninterleave = 2\n')
    layout = load_layout(path)
    assert (layout.interleave, layout.parts("sequence")) == (2, 4)
    assert [layout.held_positions(tokens) for tokens in (1, 8, 9, 1000)] == [8, 8, 16, 1000]
    assert load_layout("tp8").held_positions(9) == 9  # a whole sequence has no turns
    path.write_text('[mesh]\ntensor = 4\n[axes]\nbatch = "tensor"\n[cache]\nsequence = "tensor"\ninterleave = "2"\n')
    with pytest.raises(LayoutError) as caught:
        load_layout(path)
    assert len(caught.value.problems) == 2
    assert "interleave = '2': consecutive positions on one device, a whole number" in str(caught.value)
    assert 'sequence and batch both lie on mesh axis "tensor"' in str(caught.value)
