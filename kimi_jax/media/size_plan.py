"""How large a picture of a given size is made, and how many tokens it then takes. Source: vision notes, section 3.1."""

import math
from dataclasses import dataclass

from kimi_jax.media.picture import Grid, tokens_of
from kimi_jax.media.settings import Settings


@dataclass(frozen=True)
class SizePlan:
    """Pixels of the picture once resized, of the padding right and below it, and its grid of patches."""

    width: int
    height: int
    pad_width: int
    pad_height: int
    grid: Grid

    @property
    def tokens(self) -> int:
        """Places in the prompt."""
        return tokens_of(self.grid)


def plan_size(width: int, height: int, settings: Settings) -> SizePlan:
    """The plan for a picture of ``width`` by ``height`` pixels. Never enlarges.

    The limit on patches counts whole ones before padding, so that the largest picture has 67,268 patches at the released
    limit of 65,536.

    Raises:
      ValueError: a side below 1.
    """
    if min(width, height) < 1:
        raise ValueError(f"a picture of {width}x{height} pixels has no size")
    patch, unit, side = settings.patch, settings.unit, settings.side_patches * settings.patch
    by_area = math.sqrt(settings.patches / (max(1, width // patch) * max(1, height // patch)))
    scale = min(1.0, by_area, side / width, side / height)
    new_width = min(max(1, math.floor(width * scale)), side)
    new_height = min(max(1, math.floor(height * scale)), side)
    pad_width, pad_height = -new_width % unit, -new_height % unit
    grid = (1, (new_height + pad_height) // patch, (new_width + pad_width) // patch)
    return SizePlan(new_width, new_height, pad_width, pad_height, grid)
