"""Scratch of a vision call, held against what the compiler of MI355X took for the released tower."""

import pytest

import kimi_jax
from kimi_jax.config import load_config
from kimi_jax.placement.layout import Layout
from kimi_jax.planning.notes import notes
from kimi_jax.vision_steps import call_bytes

COMPILED = {  # (devices that share heads and MLPs, patches): temporary bytes of 27 blocks in bfloat16, gfx950, JAX 0.10.2
    (1, 4096): 474_243_800,
    (1, 8192): 862_216_920,
    (4, 4096): 136_679_896,
}


@pytest.mark.parametrize("devices, patches", COMPILED)
def test_scratch_is_what_the_compiler_takes(devices, patches):
    # red when the MLP is counted once, q, k and v are left out, or the cut of heads is not seen
    vision = load_config("k3").vision
    assert vision is not None
    layout = Layout("t", mesh={"tensor": devices}, axes={"vision_heads": "tensor", "vision_ffn": "tensor"})
    assert call_bytes(vision, layout, patches) == pytest.approx(COMPILED[devices, patches], rel=0.05)


def test_a_plan_with_vision_says_so():
    # red when the note is missing, or made for a plan that loads no vision
    told = [line for line in notes(kimi_jax.plan("k3", "tp8", context=64, vision="replicated")) if "images" in line]
    assert len(told) == 1
    assert "GiB more for 8,192 patches" in told[0]
    assert not [line for line in notes(kimi_jax.plan("k3", "tp8", context=64)) if "images" in line]


def test_a_tower_that_is_cut_is_not_dealt_pictures():
    # red when devices that sum up parts of a tower are said to hold different pictures: the layout contradicts itself
    cut, whole = (kimi_jax.plan("k3", "tp8", context=64, vision=place).ask.placed for place in ("split", "replicated"))
    assert (cut.parts("images"), cut.parts("vision_ffn")) == (1, 8)
    assert (whole.parts("images"), whole.parts("vision_ffn")) == (8, 1)
