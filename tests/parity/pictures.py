"""Small made pictures, as files hold them."""

import io

import numpy as np
from PIL import Image


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random colours: equal arguments give equal bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
