"""A decoded picture to patches, exactly as the released processor does. Source: vision notes, section 3.2."""

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from kimi_jax.media.settings import Settings
from kimi_jax.media.size_plan import SizePlan

_BAND = 256
"""Rows that are blended at a time: three float32 copies of a whole picture would take more than its patches."""


def patches_of(
    image: Image.Image, plan: SizePlan, settings: Settings
) -> UInt8[np.ndarray, "patches colours rows columns"]:
    """The patches of a picture, row by row of its grid, as bytes; padding is black.

    Args:
      image: in the mode it was decoded in; palette and 1-bit pictures are resized without blending, as Pillow does.
      plan: of its size.
      settings: patch size and the board behind transparent pixels.
    """
    resized = image.resize((plan.width, plan.height), Image.Resampling.BICUBIC)
    colours = _opaque(resized, settings)
    padded = np.pad(colours, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))
    _, rows, columns = plan.grid
    cut = padded.reshape(rows, settings.patch, columns, settings.patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, settings.patch, settings.patch)


def _opaque(image: Image.Image, settings: Settings) -> UInt8[np.ndarray, "height width colours"]:
    if image.mode == "RGB":  # a transparent colour of such a picture is not looked at
        return np.asarray(image)
    if "A" not in image.getbands() and "transparency" not in image.info:
        return np.asarray(image.convert("RGB"))
    layers = np.asarray(image.convert("RGBA"))
    height, width = layers.shape[:2]
    out = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _BAND):
        band = layers[top : top + _BAND]
        alpha = band[..., 3:].astype(np.float32) / np.float32(255)
        board = _board(top, band.shape[0], width, settings)[..., None]
        # float32 throughout, then cut off: float64 or rounding gives other bytes
        out[top : top + _BAND] = (alpha * band[..., :3].astype(np.float32) + (1 - alpha) * board).astype(np.uint8)
    return out


def _board(top: int, height: int, width: int, settings: Settings) -> Float32[np.ndarray, "height width"]:
    rows, columns = np.arange(top, top + height) // settings.square, np.arange(width) // settings.square
    odd = (rows[:, None] + columns) % 2 == 1
    levels = (settings.white, settings.grey) if settings.white_first else (settings.grey, settings.white)
    return np.where(odd, levels[1], levels[0]).astype(np.float32)
