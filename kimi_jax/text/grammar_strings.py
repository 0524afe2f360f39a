"""Strings that stand in a reply as they are, without quotes or escapes: a schema of them as a terminal of the grammar.

llguidance compiles the strings of JSON text itself; those of tool arguments are raw on the wire.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_jax.text.errors import shown
from kimi_jax.text.grammar_rules import TEXT
from kimi_jax.text.grammar_schema import SchemaError, kinds, resolve

MAX_PARTS = 512
"""Schemas that one string may be made of: references can multiply them without end."""

_DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_FOURTH = "0[48]|[2468][048]|[13579][26]"
_DATE = f"([0-9]{{4}}-({_DAYS})|([0-9]{{2}}({_FOURTH})|(00|{_FOURTH})00)-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9][A-Za-z0-9_+-]{0,62}@([A-Za-z0-9][A-Za-z0-9-]{0,30}\.){1,4}[A-Za-z]{2,24}",
}
"""The formats of raw strings that are enforced."""


class RawStrings:
    """Turns the schemas of one root into terminals."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts = 0

    def terminal(self, schema: Any, followed: tuple[str, ...] = ()) -> str:
        """A terminal's expression for the strings that a schema admits.

        Args:
          schema: one that admits strings (`kinds`).
          followed: references that led here.

        Raises:
          SchemaError: a keyword that cannot be enforced on raw text.
        """
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise SchemaError(f"a string made of more than {MAX_PARTS} schemas")
        wanted = list(self._wanted(schema, followed)) if isinstance(schema, Mapping) else []
        return " & ".join(wanted) or TEXT

    def _wanted(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> Iterator[str]:
        for keyword in ("not", "if", "contentEncoding", "$dynamicRef"):
            if keyword in schema:
                raise SchemaError(f"{keyword!r} of a string is not enforced; pattern, enum, anyOf and the like work")
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in followed:
                raise SchemaError(f"$ref {reference[:60]!r} of a string leads back to itself")
            yield f"({self.terminal(resolve(reference, self._root), (*followed, reference))})"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            yield f"({' | '.join(json.dumps(value) for value in values if isinstance(value, str))})"
        for keyword, join in (("anyOf", _any), ("oneOf", _one)):
            if isinstance(schema.get(keyword), list):
                yield join(self._branches(schema[keyword], followed))
        if isinstance(schema.get("allOf"), list):
            yield from (f"({self.terminal(branch, followed)})" for branch in schema["allOf"])
        if "minLength" in schema or "maxLength" in schema:
            yield f"/(?s:.{{{_length(schema, 'minLength') or 0},{_length(schema, 'maxLength')}}})/"
        if "pattern" in schema:
            yield _regex(containing(schema["pattern"]))
        if "format" in schema:
            given, known = schema["format"], ", ".join(FORMATS)
            if not isinstance(given, str) or given not in FORMATS:
                raise SchemaError(f"format {shown(given)} of a string is not enforced; these are: {known}")
            yield _regex(FORMATS[given])

    def _branches(self, branches: list[Any], followed: tuple[str, ...]) -> list[str]:
        return [f"({self.terminal(branch, followed)})" for branch in branches if "string" in kinds(branch, self._root)]


def containing(pattern: Any) -> str:
    """A regular expression for the whole of every string in which a schema's pattern is found."""
    if not isinstance(pattern, str):
        raise SchemaError(f"pattern is a string, not {type(pattern).__name__}")
    anything = "(?s:.*)"
    whole = []
    for branch in _alternatives(pattern):
        begins = branch.startswith("^")
        ends = branch.endswith("$") and (len(branch) - len(branch[:-1].rstrip("\\"))) % 2 == 1
        inner = branch[1 if begins else 0 : len(branch) - (1 if ends else 0)]
        whole.append(f"{'' if begins else anything}(?:{inner}){'' if ends else anything}")
    return "|".join(whole)


def _alternatives(pattern: str) -> list[str]:
    """The pattern cut at its outermost bars."""
    parts, level, in_class, escaped = [""], 0, False, False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and level == 0:
            parts.append("")
            continue
        else:
            level += {"(": 1, ")": -1}.get(char, 0)
        parts[-1] += char
    return parts


def _any(branches: list[str]) -> str:
    return f"({' | '.join(branches)})"


def _one(branches: list[str]) -> str:
    others = [[other for at, other in enumerate(branches) if at != number] for number in range(len(branches))]
    return _any([f"{mine} & ~{_any(rest)}" if rest else mine for mine, rest in zip(branches, others, strict=True)])


def _length(schema: Mapping[str, Any], keyword: str) -> int | str:
    value = schema.get(keyword, "")
    if value != "" and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 20):
        raise SchemaError(f"{keyword} is {shown(value)}; an integer from 0 to {1 << 20:,} works")
    return value


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dw')}/"  # \d and \w are ASCII in schemas
