"""``--image`` on the command line: a file or a URL, looked at before a model is loaded."""

import argparse
import base64
from pathlib import Path

from kimi_jax.media.limits import Limits
from kimi_jax.media.source import from_file, is_url

_MAGIC = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
"""First bytes of a file -> media type."""


def add_image_argument(parser: argparse.ArgumentParser, where: str) -> None:
    """Adds ``--image``; ``where`` says what becomes of the images."""
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a picture {where}: a file, a data: URL, or with --fetch-images an http(s) URL; may be repeated",
    )


def image_problems(args: argparse.Namespace) -> list[str]:
    """What no model could do about the images of a command line."""
    problems = []
    for given in args.image:
        remote = is_url(given) and not given[:5].lower().startswith("data:")
        if remote and not args.fetch_images:
            problems.append(f"--image {given[:60]} lies on another machine; --fetch-images allows to ask for it")
        elif not is_url(given) and not Path(given).is_file():
            problems.append(f"--image {given[:200]}: no such file")
    if args.image and not args.vision:
        problems.append("--image needs the vision tower, and --no-vision leaves it out")
    return problems


def as_url(given: str) -> str:
    """A URL as it is, a file as a ``data:`` URL, which a saved conversation keeps.

    Raises:
      MediaError: the file cannot be read, or is too large.
    """
    if is_url(given):
        return given
    data = from_file(given, Limits()).data
    kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
