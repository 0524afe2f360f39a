"""JSON as text: what the parsers accept from a model and what the renderer writes for it."""

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 200
"""Deepest nesting that is read or written: far above real schemas, far below the interpreter's own limit."""

_LARGEST_INTEGER = 4096  # bits; the interpreter refuses to write integers of more than about 14,000

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class _Number(str):
    """A number exactly as it was written."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read(text: str) -> Any:
    """The value of a JSON text, numbers kept as written (`write` gives them back).

    Raises:
      ValueError: not JSON, NaN or infinite, or nested deeper than `MAX_DEPTH`.
    """
    if depth(text) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_no_constant)


def write(value: Any) -> str:
    """A value from `read` as JSON text in the style of the wire: ``", "`` and ``": "``, non-ASCII kept."""
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        return members({key: write(item) for key, item in value.items()})
    if isinstance(value, list):
        return f"[{', '.join(map(write, value))}]"
    return quote(value)


def members(written: Mapping[str, str]) -> str:
    """A JSON object from keys and values that are already JSON text."""
    return f"{{{', '.join(f'{quote(key)}: {value}' for key, value in written.items())}}}"


def quote(value: Any) -> str:
    """A string, boolean or null as JSON; half a surrogate pair is escaped, so that the text can be sent as UTF-8."""
    written = json.dumps(value, ensure_ascii=False)
    return _LONE_SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", written)


def depth(text: str) -> int:
    """How deep the brackets of a JSON text are nested, strings left out."""
    level = deepest = 0
    for match in _BRACKETS.finditer(text):
        if match.group() in ("[", "{"):
            level += 1
            deepest = max(deepest, level)
        elif match.group() in ("]", "}"):
            level -= 1
    return deepest


def refusal(value: Any) -> str | None:
    """Why a value cannot be written as JSON, or None if it can.

    Only what JSON itself has is accepted: a key that is a number would be turned into a string in silence.
    """
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, level = pending.pop()
        if isinstance(item, int) and item.bit_length() > _LARGEST_INTEGER:
            return f"an integer of {item.bit_length()} bits is too large"
        if item is None or isinstance(item, str | int | float):
            continue
        if not isinstance(item, dict | list | tuple):
            return f"a value of type {type(item).__name__} is not JSON"
        if level == MAX_DEPTH:
            return f"nested deeper than {MAX_DEPTH} levels"
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    return f"the key {key!r} is not a string"
        pending.extend((inner, level + 1) for inner in (item.values() if isinstance(item, dict) else item))
    return None
