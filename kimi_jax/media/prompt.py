"""Pictures in a prompt of token ids: where their placeholders stand, what runs there, and what caches may reuse."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kimi_jax.media.errors import MediaError


@dataclass(frozen=True)
class Span:
    """The placeholders of one picture.

    Attributes:
      start: position of the first.
      tokens: how many there are.
      digest: of the picture.
    """

    start: int
    tokens: int
    digest: bytes

    @property
    def end(self) -> int:
        """One behind the last position."""
        return self.start + self.tokens


Chunk = tuple[Float[np.ndarray, "count embed"], Bool[np.ndarray, " count"]]
"""Image rows at their places in a part of a prompt, and where they are."""


def find_spans(ids: Sequence[int], placeholder: int, pictures: Sequence[tuple[int, bytes]]) -> tuple[Span, ...]:
    """The span of each picture, in order.

    Args:
      ids: the whole prompt, placeholders widened.
      placeholder: the id that stands for a row of a picture.
      pictures: tokens and digest of each, in order of the prompt.

    Raises:
      MediaError: the placeholders are not exactly those of the pictures. Nothing is ever cut off or filled up.
    """
    at = np.flatnonzero(np.asarray(ids, np.int64) == placeholder)
    wanted = sum(tokens for tokens, _ in pictures)
    if len(at) != wanted:
        raise MediaError(f"the prompt has {len(at):,} image placeholders for {wanted:,} rows of {len(pictures)} images")
    spans, done = [], 0
    for number, (tokens, digest) in enumerate(pictures):
        of_picture = at[done : done + tokens]
        if tokens < 1 or of_picture[-1] - of_picture[0] != tokens - 1:
            raise MediaError(f"the {tokens:,} placeholders of image {number} do not stand side by side")
        spans.append(Span(int(of_picture[0]), tokens, digest))
        done += tokens
    return tuple(spans)


def chunk_rows(
    spans: Sequence[Span], rows: Sequence[Float[np.ndarray, "tokens embed"]], start: int, count: int
) -> Chunk | None:
    """What ``layers.image_rows.merge`` needs for the positions ``start`` to ``start + count`` of a prompt.

    Args:
      spans: of all pictures of the prompt.
      rows: the tower's rows of each, in the same order; those of a picture that the chunk does not touch are not read.
      start: of the chunk.
      count: its positions.

    Returns:
      Rows at their places, zeros elsewhere, and where they are; None for a chunk without pictures, which runs as text.
    """
    found: Any = None
    here = np.zeros(count, bool)
    for span, of_picture in zip(spans, rows, strict=True):
        low, high = max(span.start, start), min(span.end, start + count)
        if low >= high:
            continue
        if len(of_picture) != span.tokens:
            raise ValueError(f"a picture of {span.tokens} placeholders has {len(of_picture)} rows")
        if found is None:
            found = np.zeros((count, of_picture.shape[1]), of_picture.dtype)
        found[low - start : high - start] = of_picture[low - span.start : high - span.start]
        here[low - start : high - start] = True
    return None if found is None else (found, here)


def call_rows(
    chunks: Sequence[Chunk | None], width: int
) -> tuple[Float[np.ndarray, "rows width embed"], Bool[np.ndarray, "rows width"]] | None:
    """The chunks of a call's rows beside one another, each padded to the call's width; None where none has pictures.

    Args:
      chunks: what :func:`chunk_rows` gives for each row, None for an idle one.
      width: tokens of the call.
    """
    given = [chunk for chunk in chunks if chunk is not None]
    if not given:
        return None
    rows = np.zeros((len(chunks), width, given[0][0].shape[1]), given[0][0].dtype)
    here = np.zeros((len(chunks), width), bool)
    for number, chunk in enumerate(chunks):
        if chunk is not None:
            rows[number, : len(chunk[0])], here[number, : len(chunk[1])] = chunk
    return rows, here


def page_marks(spans: Sequence[Span], page: int, pages: int) -> list[bytes]:
    """What each of the first pages holds beside its ids: add it to the page's key, and another picture is another prefix.

    Place, length and whole digest go in, so that no two pictures are ever confused. Empty for a page without pictures.
    """
    marks = [b""] * pages
    for span in spans:
        mark = struct.pack("<3q", span.start, span.tokens, len(span.digest)) + span.digest
        for index in range(span.start // page, min(pages, -(-span.end // page))):
            marks[index] += mark
    return marks
