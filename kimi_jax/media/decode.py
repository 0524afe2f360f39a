"""A file's bytes to a decoded picture, upright, in its own colour mode. Formats are those named here and no other.

Size is checked before pixels are decoded. Whatever Pillow raises on hostile bytes comes out as one kind of error.
"""

import io

import numpy as np
from PIL import Image

from kimi_jax.media.errors import MediaError, foreign_errors
from kimi_jax.media.jpeg_scans import check_scans
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.source import FORMATS

_SAME_AS = {"MPO": "JPEG"}
"""A JPEG file with more pictures behind the first one, as telephones write them."""

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes a picture upright. Source: EXIF 2.32, section 4.6.4, tag 274."""


def decode(data: bytes, limits: Limits, deadline: Deadline, claimed: str | None = None) -> Image.Image:
    """The first picture of a file, with its EXIF orientation applied.

    Args:
      data: the whole file.
      limits: bytes and pixels.
      deadline: looked at whenever the decoder asks for more of the file.
      claimed: media type that the sender gave; None where there was none.

    Returns:
      A loaded picture in the mode that it is stored in, except that 16-bit greys are the high bytes, as Pillow itself reads
      16-bit colours (its own conversion of such greys would make everything above 255 white).

    Raises:
      MediaError: too large, too slow, no picture of these formats, not what it claims to be, or damaged.
    """
    limits.check_bytes(len(data))
    if not data:
        raise MediaError("the file is empty")
    deadline.check("before decoding")
    with foreign_errors():
        try:
            opened = Image.open(_TimedFile(data, deadline), formats=tuple(FORMATS))
        except Image.UnidentifiedImageError:
            raise MediaError(f"it is none of {', '.join(FORMATS)}, or its header is damaged") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise MediaError(f"it has more than the limit of {limits.pixels:,} pixels") from None
        with opened:
            _check_claim(opened.format, claimed)
            _check_pixels(opened.size, limits)
            check_scans(data)
            opened.load()
            turn = _turn(opened)
            image = _eight_bits(opened)
            return image.copy() if turn is None else image.transpose(turn)


class _TimedFile(io.BytesIO):
    """The bytes of a file, which ends the decoding when the time is up."""

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.check("while decoding")
        return super().read(size)


def _check_claim(found: str | None, claimed: str | None) -> None:
    actual = FORMATS[_SAME_AS.get(found or "", found or "")]
    if claimed is not None and claimed != actual:
        raise MediaError(f"it is declared as {claimed[:60]!r}, but its bytes are {actual}")


def _check_pixels(size: tuple[int, int], limits: Limits) -> None:
    width, height = size
    if width * height > limits.pixels:
        raise MediaError(f"it has {width:,} x {height:,} = {width * height:,} pixels, the limit is {limits.pixels:,}")


def _eight_bits(image: Image.Image) -> Image.Image:
    """A 16-bit grey picture by its high bytes; its transparent value, if it has one, as an alpha band."""
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    see_through = image.info.get("transparency")
    if isinstance(see_through, int):
        alpha = Image.fromarray(np.where(values == see_through, 0, 255).astype(np.uint8))
        grey = Image.merge("LA", (grey, alpha))
    return grey


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes it upright; EXIF that cannot be read turns nothing, as in every viewer."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return None
