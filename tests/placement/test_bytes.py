"""Byte tables: the published placement of Kimi-K3 from its tensor list, to every printed digit."""

import json
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.bytes import Bytes, amount, bytes_by_category, total
from kimi_jax.placement.layout import Layout, LayoutError, load_layout

HEADS = 96
# Suffix of a tensor name -> named axis per dim, written from the published placement, not from our model.
AXES = {
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "q_b_proj", "kv_b_proj", "f_b_proj"): ("heads", None),
    ("o_proj",): (None, "heads"),
    ("q_conv1d", "k_conv1d", "v_conv1d"): ("heads", None, None),
    ("dt_bias", "A_log"): ("heads",),
    ("gate_proj", "up_proj"): ("ffn", None),
    ("down_proj",): (None, "ffn"),
    ("w1", "w3"): ("expert", "expert_ffn", "expert_latent"),
    ("w2",): ("expert", "expert_latent", "expert_ffn"),
    ("embed_tokens", "lm_head"): ("vocab", None),
    ("routed_expert_down_proj",): ("latent", None),
    ("routed_expert_up_proj",): (None, "latent"),
    ("gate",): ("router_expert", None),
    ("e_score_correction_bias",): ("router_expert",),
    ("q_a_proj",): ("q_lora", None),
}
SIZES = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}
PRINTED = {  # whole and per rank under TP8, GB of 1e9 bytes, vision not loaded
    "dense_mlp": ("1.453", "0.182"),
    "routed": ("1446.456", "180.807"),
    "shared": ("24.310", "3.039"),
    "kda_gemm": ("61.214", "7.763"),
    "mla_gemm": ("11.145", "2.029"),
    "norm": ("0.006", "0.006"),
    "other": (None, "11.231"),
}


def spec_of(row: dict) -> ArraySpec:
    """One tensor of a layer; the 896 experts of a layer as one stacked array."""
    words = row["pattern"].split(".")
    last = words[-2] if words[-1].startswith("weight") else words[-1]
    axes = next((axes for names, axes in AXES.items() if last in names), (None,) * len(row["shape"]))
    shape = (HEADS,) if last == "A_log" else tuple(row["shape"])
    if axes[0] == "expert":
        shape = (896, *shape)
    units = {"heads": HEADS, "expert_ffn": 3072, "expert_latent": 3584}
    return ArraySpec(shape, SIZES[row["dtype"]], axes, tuple(units.get(a, n) for a, n in zip(axes, shape, strict=True)))


@pytest.fixture(scope="module")
def k3(fixtures: Path) -> tuple[dict[str, ArraySpec], dict[str, str]]:
    """Arrays and categories of the released checkpoint."""
    rows = json.loads((fixtures / "tensors-kimi-k3.json").read_text())
    named = [(row["pattern"].replace("{L}", str(layer)), row) for row in rows for layer in row["layers"] or [0]]
    return {name: spec_of(row) for name, row in named}, {name: row["category"] for name, row in named}


def rows_of(k3, layout: str) -> dict[str, Bytes]:
    arrays, categories = k3
    named = {name: None if category == "vision" else category for name, category in categories.items()}
    return bytes_by_category(arrays, load_layout(layout), named.__getitem__)


def test_the_published_table(k3):
    # Red when any share is wrong: MLA rows by entries, w2 scales, replicated latent projections, a skipped category.
    rows = rows_of(k3, "tp8")
    assert set(rows) == set(PRINTED)
    for category, (whole, per_rank) in PRINTED.items():
        assert whole in (None, f"{rows[category].whole / 1e9:.3f}"), category
        assert f"{rows[category].per_device / 1e9:.3f}" == per_rank, category
    table = total(rows)
    assert f"{table.per_device / 1e9:.3f} {table.per_device / 2**30:.3f} {table.padding}" == "205.057 190.974 0"


def test_what_the_other_layouts_change(k3):
    # Red when a layout file maps another axis, or expert bytes depend on how the experts are cut.
    per_device = {
        name: total(rows_of(k3, name)).per_device for name in ("tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4")
    }
    assert per_device["ep8"] == per_device["tp4-ep2"] == per_device["tp8"]
    router = 92 * 896 * (7168 * 2 + 4)
    latent, q_lora = 92 * 2 * 3584 * 7168 * 2, 24 * 1536 * 7168 * 2
    assert per_device["tp8"] - per_device["tp8-lean"] == (router + latent + q_lora) * 7 // 8
    assert per_device["dp2-tp4"] > 1.9 * per_device["tp8"]


def test_padding_is_counted_and_every_array_of_a_spec_is():
    # Red when equal specs are counted once, or padding is left out of per_device.
    layout = Layout("cut", mesh={"tensor": 2}, axes={"expert_ffn": "tensor"})
    w2 = ArraySpec((8, 48), np.uint8, ("expert_latent", "expert_ffn"), (8, 96))
    rows = bytes_by_category({"a": w2, "b": w2, "skip": w2}, layout, {"a": "x", "b": "x", "skip": None}.get)
    assert rows == {"x": Bytes(arrays=2, whole=2 * 384, per_device=2 * 256, padding=2 * 64)}


def test_an_array_that_cannot_be_cut_is_an_error():
    # Red when a share is rounded.
    layout = Layout("cut", mesh={"tensor": 5}, axes={"heads": "tensor"})
    with pytest.raises(LayoutError, match="cannot cut heads = 96 into 5"):
        bytes_by_category({"q": ArraySpec((96,), np.uint8, ("heads",))}, layout, lambda _: "x")


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (616_562_688, "616.6 MB"), (1_560_860_000_000, "1.56 TB")],
)
def test_amounts(size, told):
    assert amount(size) == told  # red when units are of 1024
