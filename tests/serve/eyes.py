"""Eyes without a model, for tests of the protocol: rows tell which picture they are of."""

import base64
import dataclasses
import io
import threading
from typing import Any

import numpy as np
from PIL import Image

from kimi_jax.media.limits import Limits
from kimi_jax.media.picture import Picture
from kimi_jax.media.reader import PictureReader
from kimi_jax.media.room import Room
from kimi_jax.media.rows_cache import RowsCache
from kimi_jax.media.settings import Settings
from kimi_jax.serve.images import Images
from kimi_jax.serve.model import Served
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, served, tokenizer

WIDTH = 4
PAD = tokenizer().special_id("<|media_pad|>")


class FakeTower:
    """A row is the first byte of its picture, in one call for each picture.

    Attributes:
      looked: first bytes of the pictures that were looked at.
      threads: in which calls ran.
      go: calls wait for it.
      fill: what rows hold instead.
    """

    def __init__(self) -> None:
        self.looked: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.fill: float | None = None

    def pack(self, pictures: Any) -> list[tuple[int, Picture]]:
        return list(enumerate(pictures))

    def run(self, call: tuple[int, Picture]) -> dict[int, np.ndarray]:
        assert self.go.wait(20)
        number, picture = call
        value = int(picture.patches.flat[0])
        self.looked.append(value)
        self.threads.add(threading.current_thread().name)
        return {number: np.full((picture.tokens, WIDTH), value if self.fill is None else self.fill, np.float32)}

    def warm(self) -> None:
        pass


def make_eyes(limits: Limits | None = None, *, most: int = 8, room: int = 64 << 20, **reader: Any) -> Images:
    """Eyes of the fake tower; ``tower`` and ``reader`` of what comes back are there for tests."""
    kept = RowsCache(room // 2)
    space, tower = Room(room, kept.give_up), FakeTower()
    made = PictureReader(Settings(), limits or Limits(), room=space, row_bytes=WIDTH * 4, **reader)
    images = Images(tower, made, space, kept, most, WIDTH * 4, 4096)
    images.tower = tower  # pyright: ignore[reportAttributeAccessIssue]
    return images


def seeing() -> Served:
    """What a server knows of a model with eyes."""
    return dataclasses.replace(served(), placeholder=PAD)


def engine(**options: Any) -> FakeEngine:
    made = FakeEngine(served().vocab, capacity=CAPACITY, **options)
    made.embed = WIDTH
    return made


def file(size: tuple[int, int] = (30, 16), colour: int = 5, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(out, kind, **options)
    return out.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def part(given: str | bytes) -> dict[str, Any]:
    """An image part of a message: of a file's bytes, or of a URL."""
    return {"type": "image_url", "image_url": {"url": given if isinstance(given, str) else url(given)}}


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts and files."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return {"role": "user", "content": [part(one) if isinstance(one, bytes) else one for one in content]}
