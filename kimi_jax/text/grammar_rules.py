"""A grammar under construction: rules in llguidance's Lark dialect, and the part of the request that each comes from.

Markup is written as the very ids that the renderer writes, so a constrained reply has the tokens of a trained one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kimi_jax.text.tokenizer import Tokenizer

TEXT = "TEXT"
"""The terminal of free text. Only ordinary tokens make text, so no control token is ever part of it."""

_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,128}"}  # a model must not be able to write blanks for ever
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?=\n\s*\d+ \| |\Z)", re.DOTALL)


class Rules:
    """Rules, one a line.

    Args:
      tokenizer: gives the ids of markup.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines: list[str] = []
        self._places: list[str] = []
        self._names: set[str] = set()
        self.add(TEXT, "/(?s:.*)/")

    def add(self, name: str, body: str, place: str = "") -> str:
        """Adds a rule and returns its name; ``place`` is where the client's request asks for it."""
        self._names.add(name)
        self._lines.append(f"{name}: {body}")
        self._places.append(place)
        return name

    def shared(self, name: str, body: str) -> str:
        """The same for a rule that several others use: it is added once."""
        return name if name in self._names else self.add(name, body)

    def json(self, schema: Any) -> str:
        """The JSON text of the values that a schema admits."""
        wanted = schema if isinstance(schema, Mapping) else {"allOf": [schema]}
        # keys not sorted: properties are written in their order
        return f"%json {json.dumps({**wanted, 'x-guidance': _SPACE})}"

    def ids(self, segments: Iterable[tuple[str, bool]]) -> str:
        """Exactly the ids of some segments of markup."""
        return " ".join(f"<[{number}]>" for number in self._tokenizer.encode_segments(segments))

    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines)

    def explain(self, error: str) -> str:
        """An error of the grammar compiler as a line about the client's request."""
        found = _PLACE.search(error)
        if found is None:  # of the whole: a limit of the compiler
            return f"the grammar is too large: {error.split('<backtrace>')[0].strip()[:200]}"
        place, reason = self._places[int(found[1]) - 1], " ".join(found[2].split())[:300]
        return f"{place}: {reason}" if place else reason
