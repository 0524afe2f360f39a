"""How the model wants its pictures: ``preprocessor_config.json`` of the checkpoint. Source: vision notes, section 1."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.media.errors import SettingsError

FILE = "preprocessor_config.json"
MAX_BYTES = 1 << 20

_MERGE = 2
_SIZES = ("patch_size", "in_patch_limit", "patch_limit_on_one_side")
_FIXED: Mapping[str, Any] = {
    "merge_kernel_size": _MERGE,
    "fixed_output_tokens": None,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "transparent_bg_fill_stage": "after_resize",
}
_VIDEO = (
    "in_patch_limit_each_frame",
    "in_patch_limit_video",
    "sample_fps",
    "temporal_merge_kernel_size",
    "timestamp_mode",
)
"""Keys that say nothing about pictures; video is refused."""

_BACKGROUND = ("chessboard_square_size", "chessboard_white_value", "chessboard_gray_value")
_ABSENT = object()


@dataclass(frozen=True)
class Settings:
    """The released values, unless a file says otherwise.

    Attributes:
      patch: pixels of a side of one patch.
      patches: whole patches of a picture before padding.
      side_patches: patches of its longer side.
      square: pixels of a square of the board that shows through transparent pixels.
      white: grey level of half of its squares.
      grey: of the other half.
      white_first: whether the square at the top left is white.
    """

    patch: int = 14
    patches: int = 65_536
    side_patches: int = 512
    square: int = 8
    white: int = 255
    grey: int = 180
    white_first: bool = True

    @property
    def unit(self) -> int:
        """Pixels that both sides are padded to a multiple of: one token."""
        return _MERGE * self.patch


def load_settings(folder: Path) -> Settings:
    """The settings of a model folder.

    Raises:
      SettingsError: no such file, or everything in it that is not built. Defaults are never assumed: those of the released
        code differ from the released file.
    """
    path = folder / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path} cannot be used", [f"it has more than {MAX_BYTES:,} bytes"])
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} cannot be read", [str(error)], "Images need this file of the released checkpoint."
        ) from None
    section = values.get("media_proc_cfg") if isinstance(values, dict) else None
    if not isinstance(section, dict):
        raise SettingsError(f"{path} cannot be used", ["media_proc_cfg is missing, or no object"])
    return read_settings(section, str(path))


def read_settings(section: Mapping[str, Any], where: str) -> Settings:
    """The settings of a ``media_proc_cfg`` object.

    Raises:
      SettingsError: everything in it that is not built.
    """
    problems = [_whole(section, key, 1, 1 << 20) for key in _SIZES]
    for key, wanted in _FIXED.items():
        found = section.get(key, _ABSENT)
        if found != wanted or isinstance(found, bool):
            problems.append(f"{key} {_shown(found)}; built: {json.dumps(wanted)}")
    background = section.get("transparent_bg_config")
    if not isinstance(background, dict):
        problems.append("transparent_bg_config is missing, or no object")
        background = {}
    else:
        problems += [_whole(background, key, int(key == _BACKGROUND[0]), 255) for key in _BACKGROUND]
        if background.get("pattern") != "chessboard":
            problems.append(f'pattern {_shown(background.get("pattern", _ABSENT))}; built: "chessboard"')
        first = background.get("chessboard_square_on_top_left", _ABSENT)
        if not isinstance(first, bool):
            problems.append(f"chessboard_square_on_top_left {_shown(first)}; true or false works")
        problems += _unknown(background, ("pattern", "chessboard_square_on_top_left", *_BACKGROUND))
    problems += _unknown(section, (*_SIZES, *_FIXED, *_VIDEO, "transparent_bg_config"))
    problems = [problem for problem in problems if problem]
    if problems:
        raise SettingsError(f"{where} asks for what is not built", problems)
    patch, patches, side = (section[key] for key in _SIZES)
    square, white, grey = (background[key] for key in _BACKGROUND)
    return Settings(patch, patches, side, square, white, grey, background["chessboard_square_on_top_left"])


def _whole(section: Mapping[str, Any], key: str, low: int, high: int) -> str:
    value = section.get(key, _ABSENT)
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return ""
    return f"{key} {_shown(value)}; a whole number from {low} to {high:,} works"


def _unknown(section: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    return [f"{key!r} is not known" for key in section if key not in known]


def _shown(value: Any) -> str:
    return "is missing" if value is _ABSENT else f"= {json.dumps(value)[:60]}"
