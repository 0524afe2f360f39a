"""Reading a declared TOML file: find it by name or path, and say what is wrong with a key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kimi_jax.placement.files import sharding_folder
from kimi_jax.problems import ProblemsError, nearest


def find(kind: str, name: str | Path, error: type[ProblemsError]) -> Path:
    """The file of a shipped name ("tp8"), or the path itself when it ends in .toml.

    Args:
      kind: the folder under sharding/, "layouts" or "devices".
      name: a shipped name or a path.
      error: what to raise.

    Raises:
      error: no such file; the message names the nearest shipped one.
    """
    if not isinstance(name, str | Path):
        what = kind.removesuffix("s")
        shipped = ", ".join(path.stem for path in sorted((sharding_folder() / kind).glob("*.toml")))
        raise error(f"This is no {what}", [f"got {name!r:.100}"], f"Give a {what}, its file, or one of: {shipped}.")
    if isinstance(name, Path) or name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise error(f"Cannot read {path}", ["there is no such file"])
        return path
    shipped = {path.stem: path for path in sorted((sharding_folder() / kind).glob("*.toml"))}
    if name not in shipped:
        raise error(
            f'No {kind.removesuffix("s")} is called "{name}"',
            [f"not shipped{nearest(name, shipped)}"],
            "To use a file of your own, give its path with .toml at the end.",
        )
    return shipped[name]


def parse(path: Path, error: type[ProblemsError]) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
      error: the file is no valid TOML; the message holds the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(f"Cannot read {path}", [f"not valid TOML: {problem}"]) from problem


def unknown_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> list[str]:
    """One problem per key of `table` that is not known. `where` names the table in the message."""
    known = list(known)
    return [f'{where} has no key "{key}"{nearest(key, known)}' for key in table if key not in known]


def wrong_type(table: Mapping[str, Any], key: str, kind: type, where: str) -> list[str]:
    """One problem when `key` is present and is not exactly of type `kind` (a bool is no int)."""
    if key not in table or type(table[key]) is kind:
        return []
    return [f"{where}{key} must be a {kind.__name__}, got {table[key]!r}"]
