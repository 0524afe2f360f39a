"""Where a picture comes from: a ``data:`` URL, a local file, or another machine where that is allowed."""

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from kimi_jax.media.errors import MediaError
from kimi_jax.media.fetch import FetchRules, fetch
from kimi_jax.media.limits import Deadline, Limits

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Name in the image library -> media type."""

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<rest>(?:;[^;,]*)*),", re.IGNORECASE)
_MOST_HEAD = 256
_NO_CLAIM = ("application/octet-stream", "binary/octet-stream", "")


class Found(NamedTuple):
    """A file's bytes and the media type that its sender claims for them, None where it claims none."""

    data: bytes
    claimed: str | None = None


def is_url(text: str) -> bool:
    """Whether a word that may also be a path is a URL of a picture."""
    return text[:6].lower().startswith(("data:", "http:", "https:"))


def from_url(url: str, limits: Limits, deadline: Deadline, rules: FetchRules | None = None) -> Found:
    """The file behind the URL of an image part.

    Args:
      url: ``data:`` always works.
      limits: bytes of the file.
      deadline: for all that it takes.
      rules: which other machines may be asked; None for no machine at all.

    Raises:
      MediaError: another kind of URL, or one that cannot be read within the limits.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return from_data_url(url, limits)
    if scheme in ("http", "https"):
        if rules is None:
            raise MediaError("http(s) URLs are not fetched here", hint="Send the picture itself, as a data: URL.")
        answer = fetch(url, rules, limits.bytes, deadline)
        return Found(answer.data, media_type(answer.content_type))
    raise MediaError(f"its URL begins {url[:20]!r}; data:image/...;base64,... works")


def from_data_url(url: str, limits: Limits) -> Found:
    """The file inside a ``data:`` URL (RFC 2397), in base64.

    Raises:
      MediaError: no media type, another encoding, base64 that is cut off or otherwise wrong, too many bytes.
    """
    head = _DATA_URL.match(url[:_MOST_HEAD])
    if head is None:
        raise MediaError(f"its data: URL begins {url[:40]!r}; data:image/png;base64,... works")
    if head["rest"].lower().rpartition(";")[2].strip() != "base64":
        raise MediaError("its data: URL is not in base64; data:image/png;base64,... works")
    claimed = media_type(head["type"] or "text/plain")  # what RFC 2397 says of an absent one
    payload = memoryview(url.encode("ascii", "replace"))[head.end() :]
    limits.check_bytes(len(payload) // 4 * 3 - 2, "the data: URL")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the base64 of its data: URL is wrong or cut off: {error}") from None
    return Found(data, claimed)


def from_file(path: str | os.PathLike[str], limits: Limits) -> Found:
    """A local file; for command lines, never for what a client of a server names.

    Raises:
      MediaError: no such regular file, or too many bytes.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise MediaError(f"{path} is not a regular file")
        with path.open("rb") as opened:
            data = opened.read(limits.bytes + 1)
    except OSError as error:
        raise MediaError(f"{path}: {error.strerror}") from None
    limits.check_bytes(len(data), str(path))
    return Found(data)


def media_type(given: str | None) -> str | None:
    """The claim in a header or URL; None where it says nothing about the content.

    Raises:
      MediaError: the claim is a type that is not read.
    """
    name = (given or "").partition(";")[0].strip().lower()
    name = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg"}.get(name, name)
    if name in _NO_CLAIM:
        return None
    if name not in FORMATS.values():
        raise MediaError(f"it is declared as {name[:60]!r}; types that work: {', '.join(FORMATS.values())}")
    return name
