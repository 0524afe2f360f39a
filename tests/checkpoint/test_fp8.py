"""Weights re-quantised to FP8 while a checkpoint is read."""

import warnings

import jax
import ml_dtypes
import numpy as np
import pytest

import kimi_jax
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.reader import CheckpointFolder
from tests.checkpoint.models import KDA, MLA, rewritten, small
from tests.checkpoint.models import requantised as placed
from tests.checkpoint.test_converted import converted


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small(tmp_path_factory.mktemp("fp8") / "model")


def test_codes_and_scales_are_those_of_each_stored_row(source):
    # Red when rows are scaled together, by what is left of them after a cut, or codes are rounded from rounded values.
    params = placed(source)
    with CheckpointFolder.open(source) as opened:
        for name in (f"{KDA}.q_proj", f"{KDA}.o_proj", f"{MLA}.kv_b_proj", f"{MLA}.kv_a_proj_with_mqa"):
            stored = np.float32(opened.read(f"{name}.weight"))
            scale = np.abs(stored).max(axis=1) / np.float32(448)
            held = name.removeprefix("language_model.") + ".weight"
            np.testing.assert_allclose(params[f"{held}_scale"], scale, rtol=2e-7)
            codes = (stored / np.asarray(params[f"{held}_scale"])[:, None]).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(np.asarray(params[held]).view(np.uint8), codes.view(np.uint8))
    assert params["model.layers.1.block_sparse_moe.gate.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("layout", ["tp8", "tp8-lean"])
def test_every_layout_holds_the_same_codes(source, layout):
    # Red when a device that holds a part of each row takes its scale from that part.
    whole, cut = placed(source), placed(source, layout)
    treated = [name for name in whole if f"{name}_scale" in whole and whole[name].dtype == ml_dtypes.float8_e4m3fn]
    assert len(treated) > 15
    for name in (*treated, *(f"{name}_scale" for name in treated)):
        np.testing.assert_array_equal(np.asarray(whole[name]).view(np.uint8), np.asarray(cut[name]).view(np.uint8))
    o_proj = cut["model.layers.0.self_attn.o_proj.weight"]
    assert o_proj.addressable_shards[0].data.shape == (o_proj.shape[0], o_proj.shape[1] // 8)


def test_a_converted_checkpoint_gives_the_same(source, tmp_path):
    # Red when what orbax restores goes past the treatment.
    released, again = placed(source), placed(converted(source, tmp_path / "converted"))
    assert released.keys() == again.keys()
    for name, array in released.items():
        np.testing.assert_array_equal(np.asarray(array).view(np.uint8), np.asarray(again[name]).view(np.uint8))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_no_scale_can_hold_is_refused_by_name(source, tmp_path, value):
    # Red when a NaN hides in a maximum, or the arrays that landed before stay on the device.
    def change(tensors):
        tensors[f"{MLA}.o_proj.weight"] = np.array(tensors[f"{MLA}.o_proj.weight"])
        tensors[f"{MLA}.o_proj.weight"][3, 5] = value

    folder, before = rewritten(source, tmp_path / "bad", change), len(jax.live_arrays())
    with pytest.raises(CheckpointError) as caught:
        placed(folder)
    assert "layers.1.self_attn.o_proj.weight" in caught.value.title
    assert caught.value.problems == ("row 3 holds NaN or infinity",)
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("layout", ["single", "tp8"])
def test_it_weighs_what_the_plan_says(source, layout):
    # Red when the planner and the loader treat other parameters, or one of them forgets the scales.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = placed(source, layout)
    held = sum(array.addressable_shards[0].data.nbytes for array in params.values())
    plan = kimi_jax.plan(source, layout, "mi355x", 64, fp8="ptpc", kv_dtype="bfloat16")
    assert held == plan.sizes.weight_bytes
