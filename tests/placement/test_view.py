"""Which device holds which slice: as JAX lays it out, every entry as often as it has copies, and drawn as it lies."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import block_at
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.placement.view import FigureError, copies, describe, draw, pieces, rows, table

ARRAYS = {
    "head": ArraySpec((64, 5), np.uint8, ("vocab", "embed")),
    "experts.w1": ArraySpec((4, 192, 8), np.uint8, ("expert", "expert_ffn", "expert_latent"), (4, 192, 16)),
    "experts.w2_scale": ArraySpec((4, 16, 6), np.uint8, ("expert", "expert_latent", "expert_ffn"), (4, 16, 192)),
    "norm": ArraySpec((7,), np.uint8, (None,)),
    "latent": ArraySpec((2, 16, 3), np.uint8, ("batch", "sequence", None)),
}
LAYOUTS = {
    "tp8": load_layout("tp8"),
    "tp4-ep2": load_layout("tp4-ep2"),
    "dp2-tp4": load_layout("dp2-tp4"),
    "swapped": Layout("swapped", mesh={"a": 2, "b": 4}, axes={"vocab": ("b", "a"), "expert": ("a",)}),
    "padded": Layout("padded", mesh={"t": 4, "d": 2}, axes={"expert_ffn": ("t",), "batch": ("d",)}),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ARRAYS)
def test_every_device_holds_what_jax_gives_it(layout, name):
    # Red when the mesh axes of a dim, or of the mesh, are counted in another order.
    array = ARRAYS[name]
    sharding = NamedSharding(make_mesh(layout, jax.devices()), layout.spec(array))
    placed = sharding.devices_indices_map(layout.placed_shape(array))
    found = pieces(layout, array)
    assert len(found) == layout.devices
    for piece, device in zip(found, sharding.mesh.devices.flat, strict=True):
        assert piece.block == block_at(layout, array, placed[device])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["head", "norm", "latent", "experts.w1"])
def test_the_slices_are_the_whole_array_as_often_as_it_has_copies(layout, name):
    # Red when copies counts a mesh axis that cuts, or two slices overlap.
    array, held = ARRAYS[name], np.zeros(ARRAYS[name].shape, int)
    for piece in pieces(layout, array):
        held[piece.block.wanted] += 1
    assert (held == copies(layout, array)).all()
    numbers = {piece.number for piece in pieces(layout, array)}
    assert numbers == set(range(layout.devices // copies(layout, array)))


def test_alike_arrays_are_one_row():
    # Red when w1 and w2 are taken for one another, or layers are not.
    spec = ArraySpec((64, 6), np.uint8, ("heads", "embed"))
    arrays = {f"layers.{layer}.w{kind}": spec for layer in range(12) for kind in (1, 2)} | {
        "kda[0]": spec,
        "kda[1]": spec,
    }
    found = rows(load_layout("tp8"), arrays)
    assert [(row.name, row.count, row.per_device, row.copies) for row in found] == [
        ("layers.*.w1", 12, 12 * 48, 1),
        ("layers.*.w2", 12, 12 * 48, 1),
        ("kda[*]", 2, 96, 1),
    ]


def test_the_table_says_shape_cut_bytes_and_copies():
    lines = table(LAYOUTS["padded"], ARRAYS).splitlines()
    assert len(lines) == 1 + len(ARRAYS)
    row = next(line for line in lines if "experts.w1" in line).split("  ")
    cells = [cell.strip() for cell in row if cell.strip()]
    # 192 units over 4 are 48, one group and a half: two groups, 64 units, on each device. Red without the padding.
    assert cells == ["1x", "experts.w1", "uint8", "[4, 192, 8]", "[4, 64, 8]", "expert_ffn / 4", "2,048", "2"]


def test_one_array_in_full():
    told = describe(LAYOUTS["padded"], "w1", ARRAYS["experts.w1"])
    assert "dim 1        192  expert_ffn: cut over t into 4 of 64" in told
    assert "2,048 bytes, 512 of them padding; each slice lies on 2 devices" in told
    assert "device 3 (t 1, d 1): dim 1 [48:96] and 16 of padding" in told  # red when the device order is another
    whole = describe(LAYOUTS["tp8"], "norm", ARRAYS["norm"])
    assert "no name, never cut: whole" in whole and "on 8 devices" in whole and "device 0" not in whole


def test_a_figure_shows_what_each_device_holds():
    pytest.importorskip("matplotlib")
    figure = draw(LAYOUTS["tp4-ep2"], ARRAYS, "small")
    (axes,) = figure.axes
    filled = [patch for patch in axes.patches if patch.get_fill()]
    assert len(filled) == 8 * len(ARRAYS)
    # head: 64 rows over 8 devices, drawn downwards: red when the slice of another device is drawn.
    first = filled[:8]
    assert [round(patch.get_height() / 0.75, 6) for patch in first] == [0.125] * 8
    tops = [patch.get_y() + patch.get_height() for patch in first]
    assert tops == sorted(tops, reverse=True) and len({patch.get_facecolor() for patch in first}) == 8
    grey = [patch.get_facecolor() for patch in filled[24:32]]
    assert len(set(grey)) == 1  # red when a replicated vector gets the colours of slices
    assert {text.get_text() for text in axes.texts} >= {"0", "7", "head", "uint8 [64, 5]"}


def test_padding_is_hatched():
    pytest.importorskip("matplotlib")
    (axes,) = draw(LAYOUTS["padded"], {"w1": ARRAYS["experts.w1"]}).axes
    assert sum(patch.get_hatch() is not None for patch in axes.patches) == 8
    (axes,) = draw(LAYOUTS["tp4-ep2"], {"head": ARRAYS["head"]}).axes
    assert sum(patch.get_hatch() is not None for patch in axes.patches) == 0  # red when every slice is


def test_without_matplotlib(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FigureError, match=r'pip install "kimi-jax\[notebooks\]"'):
        draw(LAYOUTS["tp8"], {})
