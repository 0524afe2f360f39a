"""What one picture may cost before it is refused: bytes and pixels are known before anything is decoded."""

import time
from dataclasses import dataclass

from kimi_jax.media.errors import MediaError

PILLOW_PIXELS = 89_478_485
"""Pillow's own limit (a quarter GiB of 3-byte pixels), above which it warns. Not raised: it is a global of the process."""


@dataclass(frozen=True)
class Limits:
    """Limits of one picture.

    Attributes:
      bytes: of the file, after base64 is undone.
      pixels: width times height as stored. Pillow holds up to 4 bytes for each, twice while it turns or converts a picture.
      seconds: from the moment it is asked for, waiting included, until its patches are ready.

    Raises:
      ValueError: a limit below 1, or more pixels than Pillow opens.
    """

    bytes: int = 20 << 20
    pixels: int = 64 << 20
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.seconds <= 0 or not 1 <= self.pixels <= PILLOW_PIXELS:
            raise ValueError(f"{self}: bytes and seconds must be positive, pixels from 1 to {PILLOW_PIXELS:,}")

    def check_bytes(self, count: int, what: str = "the file") -> None:
        """Raises MediaError where a picture of ``count`` bytes is too large."""
        if count > self.bytes:
            raise MediaError(f"{what} has {count:,} bytes, the limit is {self.bytes:,}")

    def deadline(self) -> "Deadline":
        """The limit in time, running from now."""
        return Deadline(time.monotonic() + self.seconds, self.seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment of ``time.monotonic`` until which a picture must be ready."""

    moment: float
    seconds: float

    @property
    def left(self) -> float:
        """Seconds that are left; 0 or less when it has passed."""
        return self.moment - time.monotonic()

    def check(self, doing: str) -> None:
        """Raises MediaError where the time is up."""
        if self.left <= 0:
            raise MediaError(f"it is not ready after {self.seconds:g} seconds, which is the limit ({doing})")
