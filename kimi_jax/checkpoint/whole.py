"""A folder that appears under its name only when everything in it is written."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.index import INDEX_NAME

MARKER = "kimi_jax.json"
"""Names a folder as a converted checkpoint."""

_SIDE_SUFFIXES = (".json", ".jinja", ".md", ".model", ".py", ".txt")
_SIDE_NAMES = ("LICENSE", "NOTICE")


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A new folder beside ``destination`` to write into; renamed to it on success, removed on any error.

    A process that is killed leaves only the hidden ``.<name>.partial-*`` behind.

    Raises:
      CheckpointError: the destination exists, or the system refuses to write.
    """
    title = f"{destination} cannot be written"
    if os.path.lexists(destination):
        raise CheckpointError(title, ["it already exists"], "Remove it or choose another name.")
    partial = destination.absolute().parent / f".{destination.name}.partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(title, [str(error)]) from error
        raise


def side_files(folder: Path) -> list[Path]:
    """What belongs to a model beside its weights: configuration, tokenizer, template, code, licence."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if (entry.suffix in _SIDE_SUFFIXES or entry.name.startswith(_SIDE_NAMES))
        and entry.name not in (INDEX_NAME, MARKER)
        and not entry.name.startswith(".")
        and entry.is_file()
    )


def copy_side_files(source: Path, destination: Path) -> None:
    """Copies the contents of ``side_files``; links become files."""
    for file in side_files(source):
        shutil.copyfile(file, destination / file.name)
