"""Small pictures: a canvas, shapes on it, and the two forms in which a model takes it in."""

import struct
import zlib

import numpy as np
from jaxtyping import Bool

from kimi_jax.media.picture import Picture
from kimi_jax.train.data.example import Pixels

PATCH, TOKEN = 14, 28
"""Pixels of a side of a patch, and of what one place of the prompt shows."""

SHAPES = ("circle", "square", "triangle", "cross")

PAINTS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "black": (20, 20, 20),
}
"""Colour -> red, green, blue."""


def canvas(columns: int, rows: int, paint: tuple[int, int, int]) -> Pixels:
    """An empty picture of so many places of the prompt."""
    pixels = np.empty((rows * TOKEN, columns * TOKEN, 3), np.uint8)
    pixels[:] = paint
    return pixels


def stamp(
    pixels: Pixels, mask: Bool[np.ndarray, "height width"], top: int, left: int, paint: tuple[int, int, int]
) -> None:
    """Paints where a mask says so; the mask must lie on the canvas."""
    area = pixels[top : top + mask.shape[0], left : left + mask.shape[1]]
    area[mask] = paint


def shape_mask(shape: str, size: int) -> Bool[np.ndarray, "size size"]:
    """A shape that fills a square of pixels."""
    twice = 2 * np.indices((size, size)) - (size - 1)  # whole numbers: rounding is nowhere in doubt
    if shape == "circle":
        return np.less_equal((twice**2).sum(0), size**2)
    if shape == "triangle":
        return np.less_equal(np.abs(twice[1]), np.indices((size, size))[0])
    if shape == "cross":
        return np.any(np.abs(twice) * 3 <= size, axis=0)
    return np.ones((size, size), bool)


def png(pixels: Pixels) -> bytes:
    """A PNG file, not compressed: the same bytes whatever compresses here. Source: PNG specification; RFC 1950, RFC 1951."""
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()
    blocks = [rows[at : at + 65535] for at in range(0, len(rows), 65535)]
    stored = b"".join(
        struct.pack("<BHH", at == len(blocks) - 1, len(block), len(block) ^ 0xFFFF) + block
        for at, block in enumerate(blocks)
    )
    packed = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(pixels: Pixels) -> Picture:
    """The picture made ready for the tower, without an image library: it is neither resized nor padded.

    Raises:
      ValueError: sides that are no multiples of `TOKEN`.
    """
    height, width = pixels.shape[:2]
    if height % TOKEN or width % TOKEN:
        raise ValueError(f"a drawing of {width}x{height} pixels; multiples of {TOKEN} work")
    rows, columns = height // PATCH, width // PATCH
    cut = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return Picture(width, height, (1, rows, columns), np.ascontiguousarray(cut).reshape(-1, 3, PATCH, PATCH))
