"""The eyes of a loaded model: a picture is read under limits, its rows are computed once and kept on the host."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kimi_jax.config import KimiConfig, VisionConfig
from kimi_jax.engine.request import ImageSpan
from kimi_jax.media.errors import MediaError, SettingsError
from kimi_jax.media.fetch import FetchRules
from kimi_jax.media.limits import Limits
from kimi_jax.media.picture import Picture
from kimi_jax.media.prompt import Span
from kimi_jax.media.rows_cache import RowsCache
from kimi_jax.media.settings import Settings, load_settings
from kimi_jax.media.source import Found, from_file, from_url, is_url
from kimi_jax.vision_steps import TowerCall, VisionSteps

ROWS_BYTES = 1 << 30
"""Rows that are kept on the host: 75,000 tokens of images in Kimi-K3."""

Image = str | os.PathLike[str] | bytes | Picture
IMAGE_TYPES = (str, os.PathLike, bytes, Picture)
"""A file's path, a ``data:`` URL (http and https where fetching is switched on), a file's bytes, or a picture made ready."""


@dataclass(frozen=True, eq=False)
class ImageEncoder:
    """Vision tower and projector of one model on one mesh; safe to share between threads.

    Attributes:
      steps: the compiled programs.
      params: placed as they and the layout say.
      settings: how the model wants its pictures.
      limits: of one picture.
      rules: which other machines may be asked for pictures; None for none.
      kept: rows of pictures seen lately.
    """

    steps: VisionSteps
    params: Mapping[str, Any]
    settings: Settings
    limits: Limits = field(default_factory=Limits)
    rules: FetchRules | None = None
    kept: RowsCache = field(default_factory=lambda: RowsCache(ROWS_BYTES))

    @property
    def config(self) -> VisionConfig:
        """Sizes of the tower."""
        return self.steps.vision

    @property
    def weight_bytes(self) -> int:
        """Bytes of tower and projector on one device."""
        return self.steps.weight_bytes

    def read(self, image: Image) -> Picture:
        """A picture made ready for :meth:`embed`; reads local files, so never hand it the words of a server's client.

        Raises:
          MediaError: it cannot be used within the limits.
        """
        if isinstance(image, Picture):
            return image
        deadline = self.limits.deadline()
        if isinstance(image, bytes):
            found = Found(image)
        elif isinstance(image, str) and is_url(image):
            found = from_url(image, self.limits, deadline, self.rules)
        elif isinstance(image, str | os.PathLike):
            found = from_file(image, self.limits)
        else:
            raise MediaError(f"it is of type {type(image).__name__}; a path, a data: URL, or a file's bytes work")
        return self.prepare(found, deadline)

    def read_each(self, wanted: Sequence[tuple[str, Callable[[], Picture]]]) -> list[Picture]:
        """Several pictures.

        Args:
          wanted: for each what it is called in errors, and what reads it.

        Raises:
          MediaError: names all that cannot be used.
        """
        pictures, problems, hint = [], [], ""
        for name, read in wanted:
            try:
                pictures.append(read())
            except MediaError as error:
                problems += [f"{name}: {problem}" for problem in error.problems]
                hint = hint or error.hint
        if problems:
            raise MediaError(*problems, hint=hint)
        return pictures

    def read_url(self, url: str) -> Picture:
        """The picture behind the URL of an image part: local files are out of reach.

        Raises:
          MediaError: it cannot be used within the limits.
        """
        deadline = self.limits.deadline()
        return self.prepare(from_url(url, self.limits, deadline, self.rules), deadline)

    def prepare(self, found: Found, deadline: Any) -> Picture:
        """Decoded, resized and cut into patches."""
        try:
            from kimi_jax.media.prepare import prepare
        except ImportError as error:
            raise MediaError(
                f"the image library is missing: {error}", hint='pip install "kimi-jax[vision]" adds it.'
            ) from None
        return prepare(found.data, self.settings, self.limits, deadline, found.claimed)

    def embed(self, pictures: Sequence[Picture]) -> list[Float[np.ndarray, "tokens embed"]]:
        """Rows of each picture for the text stream, in the activation dtype; those seen lately are not computed again.

        Raises:
          MediaError: a size that the tower does not take.
        """
        with _tower_errors():
            return self.kept.rows(pictures, lambda missing: self.steps.embed(self.params, missing))

    def spans(self, places: Sequence[Span], pictures: Sequence[Picture]) -> tuple[ImageSpan, ...]:
        """What a request carries of the pictures whose placeholders stand at some places of its prompt."""
        rows = self.embed(pictures)
        return tuple(ImageSpan(place.start, row, place.digest) for place, row in zip(places, rows, strict=True))

    def pack(self, pictures: Sequence[Picture]) -> list[TowerCall]:
        """The calls that compute some pictures; touches no device, so that any thread may do it.

        Raises:
          MediaError: a size that the tower does not take.
        """
        with _tower_errors():
            return self.steps.packs_of(pictures)

    def run(self, call: TowerCall) -> dict[int, Float[np.ndarray, "tokens embed"]]:
        """Rows by the number of their picture among those that were packed."""
        return self.steps.run(self.params, call)

    def warm(self) -> None:
        """Compiles every program, so that no image waits for a compiler."""
        self.steps.warm(self.params)


@contextmanager
def _tower_errors() -> Iterator[None]:
    """A picture that the tower does not take is one that cannot be read."""
    try:
        yield
    except ValueError as error:
        raise MediaError(str(error)) from None


def picture_settings(folder: Path, config: KimiConfig, wanted: bool | None) -> tuple[Settings | None, str]:
    """How a model folder wants its pictures, and else why it is loaded as a text model.

    Args:
      wanted: True to insist on pictures, False to leave the tower out, None to take it where the folder has all of it.

    Raises:
      SettingsError: insisted on, and not there.
    """
    if wanted is False:
        return None, "the model was loaded without its vision tower"
    if config.vision is None:
        reason = f"{config.name} is a text model: its config.json has no vision_config"
    elif config.media_placeholder is None:
        reason = f"the config.json of {config.name} has no media_placeholder_token_id"
    else:
        try:
            settings = load_settings(folder)
        except SettingsError as error:
            reason = str(error)
        else:
            if settings.patch == config.vision.patch:
                return settings, ""
            reason = (
                f"pictures are cut into patches of {settings.patch} pixels, and the tower takes {config.vision.patch}"
            )
    if wanted:
        raise SettingsError(f"{config.name} cannot be loaded with vision", [reason])
    return None, reason
