"""JSON from a stranger: parsed strictly, and quoted in messages without harm."""

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

MAX_LISTED = 50  # problems of one kind that are worth reading
_SURROGATE = re.compile("[\ud800-\udfff]")

_short = reprlib.Repr()
_short.maxstring = 200
_short.maxother = 200
_short.maxlist = 8


def parse_json(raw: bytes) -> tuple[Any, list[str]]:
    """The value written in ``raw`` and what is wrong with it: strict UTF-8, no NaN, no key twice in one object.

    The value is None when it cannot be parsed at all. Keys that occur twice are reported and the last one is kept.
    """
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return members

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not allowed")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as error:
        return None, [f"is not UTF-8: {error.reason} at byte {error.start}"]
    except RecursionError:
        return None, ["is not usable JSON: it nests too deeply"]
    except ValueError as error:  # bad JSON, NaN, or an integer of thousands of digits
        return None, [f"is not usable JSON: {error}"]
    return value, [f"has the key {shown(key)} twice" for key in dict.fromkeys(repeated)]


def shown(value: object) -> str:
    """A value from a file, safe to print: escaped, in quotes, shortened in the middle."""
    return _short.repr(value)


def limited(problems: Sequence[str]) -> list[str]:
    """The first ``MAX_LISTED`` problems and a line that counts the others."""
    if len(problems) <= MAX_LISTED:
        return list(problems)
    return [*problems[:MAX_LISTED], f"... and {len(problems) - MAX_LISTED:,} more like these"]


def printable(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8, which a lone surrogate cannot."""
    return name.isascii() or not _SURROGATE.search(name)
