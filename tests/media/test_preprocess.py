"""Preprocessing against what the released processor made of the same files, byte for byte."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.media.errors import SettingsError
from kimi_jax.media.limits import Limits
from kimi_jax.media.packing import normalise
from kimi_jax.media.prepare import prepare
from kimi_jax.media.settings import Settings, load_settings, read_settings
from kimi_jax.media.size_plan import plan_size
from kimi_jax.text.markup import image_prompt

FOLDER = Path(__file__).parents[1] / "fixtures" / "vision-tiny"
RECORD = json.loads((FOLDER / "preprocess.json").read_text())
SECTION = RECORD["media_proc_cfg"]
CASES = {case["id"]: case for case in RECORD["cases"]}


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "preprocess.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", CASES)
def test_patches_are_those_of_the_release(name):
    # red when alpha is dropped, rounded or blended before the resize, the board starts grey, padding is left or white,
    # columns come before rows, or palettes are blended
    case = CASES[name]
    settings = read_settings({**SECTION, **case["limits"]}, "test")
    picture = prepare((FOLDER / case["file"]).read_bytes(), settings, Limits())
    plan = plan_size(*case["size"], settings)
    assert (plan.width, plan.height, plan.pad_width, plan.pad_height) == tuple(case["resize"].values())
    assert [picture.width, picture.height] == case["size"]
    assert list(picture.grid) == case["grid"] == list(plan.grid)
    assert picture.tokens == case["num_tokens"] == plan.tokens
    np.testing.assert_array_equal(picture.patches, golden()[f"{name}.pixels_u8"])
    assert image_prompt(picture.width, picture.height) == case["image_prompt"]


def test_levels_are_exact():
    # red when the arithmetic is in float64, or fused into v / 127.5 - 1
    levels = np.arange(256, dtype=np.uint8)
    wanted = (levels.astype(np.float32) / np.float32(255) - np.float32(0.5)) * np.float32(2)
    assert normalise(levels).tobytes() == wanted.tobytes()
    assert normalise(levels)[[0, 255]].tolist() == [-1, 1]
    every = [normalise(golden()[f"{name}.pixels_u8"]).astype(np.float64).sum() for name in CASES]
    np.testing.assert_allclose(every, [golden()[f"{name}.pixel_sum"][0] for name in CASES], rtol=1e-6)


@pytest.mark.parametrize(
    "width, height, resized, pads, grid, tokens",
    [
        (1, 1, (1, 1), (27, 27), (1, 2, 2), 1),
        (28, 28, (28, 28), (0, 0), (1, 2, 2), 1),
        (29, 28, (29, 28), (27, 0), (1, 2, 4), 2),
        (30, 16, (30, 16), (26, 12), (1, 2, 4), 2),
        (224, 224, (224, 224), (0, 0), (1, 16, 16), 64),
        (448, 448, (448, 448), (0, 0), (1, 32, 32), 256),
        (512, 512, (512, 512), (20, 20), (1, 38, 38), 361),
        (640, 480, (640, 480), (4, 24), (1, 36, 46), 414),
        (1920, 1080, (1920, 1080), (12, 12), (1, 78, 138), 2691),
        (3840, 2160, (3840, 2160), (24, 24), (1, 156, 276), 10764),
        (3584, 3584, (3584, 3584), (0, 0), (1, 256, 256), 16384),
        (8000, 100, (7168, 89), (0, 23), (1, 8, 512), 1024),
        (20000, 20, (7168, 7), (0, 21), (1, 2, 512), 256),
        (10000, 10000, (3585, 3585), (27, 27), (1, 258, 258), 16641),
    ],
)
def test_plans_of_the_notes(width, height, resized, pads, grid, tokens):
    # red when a side is rounded instead of cut, or the limit counts padded patches
    plan = plan_size(width, height, Settings())
    assert (plan.width, plan.height) == resized
    assert (plan.pad_width, plan.pad_height) == pads
    assert (plan.grid, plan.tokens) == (grid, tokens)


def test_the_largest_picture():
    # red when buffers are sized for 16,384 tokens; the notes' largest is 1861 x 7041
    assert plan_size(1861, 7041, Settings()).tokens == 16_817
    edges = [14 * n + d for n in (1, 2, 127, 128, 132, 133, 255, 256, 257, 300, 502, 503, 511, 512) for d in (-1, 0, 1)]
    plans = [plan_size(width, height, Settings()) for width in edges for height in edges]
    assert max(plan.tokens for plan in plans) <= 16_817
    assert max(max(plan.grid[1:]) for plan in plans) <= 512


def test_settings_of_the_file(tmp_path):
    # red when a default stands in for the file, as those of the released code differ
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": SECTION, "other": 1}))
    assert load_settings(tmp_path) == Settings()
    board = {**SECTION["transparent_bg_config"], "chessboard_gray_value": 200, "chessboard_square_size": 16}
    changed = read_settings({**SECTION, "transparent_bg_config": board, "in_patch_limit": 24}, "test")
    assert changed == Settings(patches=24, square=16, grey=200)


@pytest.mark.parametrize(
    "text, message", [(None, "No such file"), ("{", "Expecting"), ("[]", "media_proc_cfg is missing")]
)
def test_no_settings(tmp_path, text, message):
    # red when a folder without the file gets defaults
    if text is not None:
        (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings(tmp_path)


def test_every_unbuilt_setting_is_named():
    # red when one of them is passed over
    faults = {
        "patch_size": True,
        "in_patch_limit": 0,
        "fixed_output_tokens": 64,
        "image_std": [1, 1, 1],
        "merge_kernel_size": 4,
        "transparent_bg_fill_stage": "before_resize",
        "new_key": 1,
        "transparent_bg_config": {
            **SECTION["transparent_bg_config"],
            "pattern": "black",
            "chessboard_white_value": 256,
        },
    }
    with pytest.raises(SettingsError) as raised:
        read_settings({**SECTION, **faults}, "test")
    text = str(raised.value)
    assert "(9 problems)" in text
    for name in (*[key for key in faults if key != "transparent_bg_config"], "pattern", "chessboard_white_value"):
        assert name in text
