"""The images of requests: read under limits in threads of their own, then made rows, one call of the tower between two turns."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kimi_jax.engine.request import ImageSpan, RequestError
from kimi_jax.media.errors import BusyError, MediaError
from kimi_jax.media.picture import Picture
from kimi_jax.media.prompt import Span
from kimi_jax.media.room import Room
from kimi_jax.media.rows_cache import RowsCache
from kimi_jax.placement.bytes import amount
from kimi_jax.serve.errors import ApiError
from kimi_jax.serve.limits import ImageLimits
from kimi_jax.serve.metrics import Metrics
from kimi_jax.serve.pump import Pump
from kimi_jax.text.errors import ChatError
from kimi_jax.text.images import ImagePart, image_parts

if TYPE_CHECKING:
    from kimi_jax.image_encoder import ImageEncoder
    from kimi_jax.media.reader import PictureReader


@dataclass(frozen=True)
class Look:
    """What the image parts of a conversation came to.

    Attributes:
      pictures: in the order of the prompt; to be used without problems only.
      problems: everything that is wrong with them, each with its place in the request.
    """

    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()


class Tower(Protocol):
    """What is used of a model's vision tower (``image_encoder.ImageEncoder``)."""

    def pack(self, pictures: Sequence[Picture]) -> list[Any]: ...
    def run(self, call: Any) -> dict[int, np.ndarray]: ...
    def warm(self) -> None: ...


class Images:
    """Reads pictures and has the tower look at them. For one event loop.

    Args:
      tower: its calls run in the engine's thread, since two threads would start programs of many devices in two orders.
      reader: of pictures; counts them in ``room``.
      room: of decoded pictures and rows.
      kept: rows of pictures seen lately.
      most: images of one request.
      row_bytes: of one row.
      group: patches that are packed at a time.
    """

    def __init__(
        self, tower: Tower, reader: "PictureReader", room: Room, kept: RowsCache, most: int, row_bytes: int, group: int
    ) -> None:
        self._tower, self._reader, self.room, self.kept = tower, reader, room, kept
        self._most, self._row_bytes, self._group = most, row_bytes, group
        # one request at a time: the next one finds the rows of a picture that both have, and packs only one are in memory
        self._turn = asyncio.Lock()

    async def look(self, parts: Sequence[ImagePart], metrics: Metrics) -> Look:
        """The pictures of image parts, as many at a time as are decoded at a time.

        Raises:
          ApiError: 503, too many are under way.
        """
        if len(parts) > self._most:
            return Look(problems=(f"the messages have {len(parts):,} images; up to {self._most:,} work",))
        pictures: list[Picture] = []
        problems: list[str] = []
        for first in range(0, len(parts), self._reader.threads):
            some = parts[first : first + self._reader.threads]
            try:
                reading = [self._reader.submit_url(part.url) for part in some]
                results = await asyncio.gather(*map(_result, reading), return_exceptions=True)
                for part, result in zip(some, results, strict=True):
                    problems += self._book(part, result, pictures)
            except BusyError as error:
                metrics.images.labels("busy").inc()
                raise busy(error) from None
            if (size := self._size(pictures)) > self.room.limit // 2:
                problems.append(
                    f"the images of this request take {amount(size)} of the host as pixels and rows; up to "
                    f"{amount(self.room.limit // 2)} work"
                )
                break
        metrics.images.labels("refused").inc(len(problems))
        metrics.images.labels("read").inc(len(pictures))
        return Look(tuple(pictures), tuple(problems))

    async def spans(self, places: Sequence[Span], pictures: list[Picture], pump: Pump) -> tuple[ImageSpan, ...]:
        """What a request carries of its pictures.

        Args:
          places: of their placeholders.
          pictures: taken out of the list when they are no longer needed.
          pump: of the engine.

        Raises:
          ApiError: 500, rows that are no numbers.
          EngineStopped: nothing more will come.
        """
        async with self._turn:
            rows = self.kept.find(pictures)
            missing = {picture.digest: picture for picture in pictures if picture.digest not in rows}
            pictures.clear()
            waiting = list(missing.values())
            missing.clear()
            while waiting:
                some = self._next(waiting)
                for number, found in await self._run(some, pump):
                    self.room.hold(found, found.nbytes)
                    self.kept.add(some[number].digest, found)
                    rows[some[number].digest] = found
        try:
            return await asyncio.to_thread(_spans, places, rows)
        except RequestError as error:
            hint = "The numbers of the vision tower cannot be trusted for this image."
            raise ApiError(
                500, "An image could not be understood", error.problems, hint, code="answer_failed"
            ) from None

    def warm(self) -> None:
        """For the engine's thread: compiles all of the tower."""
        self._tower.warm()

    def close(self) -> None:
        """Ends the reading threads, which takes as long as they read what they have begun."""
        self._reader.close()

    async def _run(self, pictures: list[Picture], pump: Pump) -> list[tuple[int, np.ndarray]]:
        calls = await asyncio.to_thread(self._tower.pack, pictures)
        found = await pump.work(self._tower.run(call) for call in calls)
        return [item for rows in found for item in rows.items()]

    def _next(self, waiting: list[Picture]) -> list[Picture]:
        """Takes out what runs in one call, or a little more."""
        some = [waiting.pop()]
        while waiting and sum(map(_patches, (*some, waiting[-1]))) <= self._group:
            some.append(waiting.pop())
        return some

    def _size(self, pictures: Sequence[Picture]) -> int:
        return sum(picture.patches.nbytes + picture.tokens * self._row_bytes for picture in pictures)

    @staticmethod
    def _book(part: ImagePart, result: "Picture | BaseException", pictures: list[Picture]) -> Iterator[str]:
        """Puts a picture to the others, or says what is wrong with it."""
        if isinstance(result, MediaError):
            more = f" ({result.hint})" if result.hint else ""
            yield from (f"{part.where}: {problem}{more}" for problem in result.problems)
        elif isinstance(result, BaseException):
            raise result
        else:
            pictures.append(result)


def find_parts(messages: Sequence[dict[str, Any]]) -> tuple[list[ImagePart], Look]:
    """The image parts of a conversation, or what is wrong with them."""
    try:
        return image_parts(messages), Look()
    except ChatError as error:
        return [], Look(problems=error.problems)


def no_images(parts: Sequence[ImagePart], why: str) -> Look:
    """What a server without eyes says of images."""
    return Look(problems=tuple(f"{part.where} is an image, which this server cannot read: {why}" for part in parts))


def busy(error: BusyError) -> ApiError:
    """Too many images at once."""
    return ApiError(
        503,
        "Too many images are under way",
        [str(error)],
        "Try again in 2 s.",
        code="images_busy",
        headers={"Retry-After": "2"},
    )


def make_images(encoder: "ImageEncoder", limits: ImageLimits) -> Images:
    """The images of a loaded model.

    Raises:
      ImportError: the image library is not installed.
    """
    from kimi_jax.media.reader import PictureReader

    kept = RowsCache(limits.memory_bytes // 2)
    room = Room(limits.memory_bytes, kept.give_up)
    steps = encoder.steps
    row_bytes = encoder.config.text_hidden * steps.precision.activation.itemsize
    reader = PictureReader(
        encoder.settings, limits.picture, encoder.rules, limits.threads, limits.waiting, room=room, row_bytes=row_bytes
    )
    return Images(encoder, reader, room, kept, limits.images, row_bytes, steps.packs * steps.buckets[-1])


async def _result(reading: "Future[Picture]") -> Picture:
    return await asyncio.wrap_future(reading)


def _patches(picture: Picture) -> int:
    return picture.patches.shape[0]


def _spans(places: Sequence[Span], rows: dict[bytes, np.ndarray]) -> tuple[ImageSpan, ...]:
    """Looks at every number once, which takes a moment for large images."""
    return tuple(ImageSpan(place.start, rows[place.digest], place.digest) for place in places)
