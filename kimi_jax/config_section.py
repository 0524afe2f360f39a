"""One JSON object of a config.json being read: fetches typed values and collects problems instead of raising."""

import json
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

LARGEST = 1 << 31
"""No size of this family comes near it; a larger one is a damaged file."""

LIST_LIMIT = 512
"""More layers than this is a damaged file; also bounds the work of checking the lists."""

NAME_LIMIT = 60
"""Characters of a key or value that an error quotes."""


class Section:
    """One object, what errors call its keys, and the list that its problems go to.

    Every method returns a value that fits, also after a complaint, so that reading goes on to the next key.
    """

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.values, self.path, self.problems = values, path, problems
        self._bad: set[str] = set()

    def complain(self, key: str, text: str) -> None:
        self._bad.add(key)
        self.problems.append(f"{self.path}{_named(key)} {text}")

    def sound(self, *keys: str) -> bool:
        """Whether nothing is wrong with these keys so far: only then do checks across keys mean anything."""
        return self._bad.isdisjoint(keys)

    def integer(self, key: str, low: int = 1, high: int = LARGEST) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            found = "is missing" if key not in self.values else f"= {shown(value)}"
            self.complain(key, f"{found}; it must be an integer from {low} to {high}")
            return low
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            found = "is missing" if value is None else f"= {shown(value)}"
            self.complain(key, f"{found}; it must be a number from {low:g} to {high:g}")
            return low
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.complain(key, f"= {shown(value)}; it must be true or false")
            return default
        return value

    def section(self, key: str) -> "Section | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.complain(key, f"= {shown(value)}; it must be an object")
            return None
        return Section(value, f"{self.path}{_named(key)}.", self.problems)

    def layer_list(self, key: str, layers: int) -> tuple[int, ...]:
        """A list of distinct layers; the file counts from 1, the result from 0."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            found = "is missing" if key not in self.values else f"= {shown(value)}"
            self.complain(key, f"{found}; it must be a list of layer numbers counted from 1")
            return ()
        outside = [i for i in value if not 1 <= i <= layers]
        if outside:
            self.complain(key, f"names {shown(outside)}; layers are counted from 1 to {layers}")
        repeated = sorted(i for i, count in Counter(value).items() if count > 1)
        if repeated:
            self.complain(key, f"names {shown(repeated)} more than once")
        return tuple(sorted({i - 1 for i in value if 1 <= i <= layers}))

    def refuse_unknown(self, known: tuple[str, ...]) -> None:
        for key in self.values:
            if key in known or key.startswith("_"):
                continue
            near = get_close_matches(key[:NAME_LIMIT], known, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            self.complain(key, f"is not a known key and could change the mathematics{guess}")

    def require(self, fixed: Mapping[str, tuple[tuple[Any, ...], str]], present: tuple[str, ...] = ()) -> None:
        """Refuses values that are not built; a missing key means the first one, unless it must be ``present``."""
        for key, (allowed, why) in fixed.items():
            missing = key not in self.values
            value = self.values.get(key, allowed[0])
            if (missing and key in present) or not any(type(value) is type(a) and value == a for a in allowed):
                choices = " or ".join(json.dumps(a) for a in allowed)
                found = "is missing" if missing else f"= {shown(value)}"
                self.complain(key, f"{found}; only {choices} is built" + (f": {why}" if why else ""))


def shown(value: Any) -> str:
    """A value from the file as an error quotes it: one short line, whatever it is."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nesting near the parser's own limit
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= NAME_LIMIT else text[: NAME_LIMIT - 3] + "..."


def _named(key: str) -> str:
    return key if len(key) <= NAME_LIMIT and key.isprintable() else shown(key)


def one_of(top: Section, text: Section, key: str) -> Section:
    """Which of the two holds a key that may stand in text_config or beside it; in both only if they say the same."""
    if key in text.values and key in top.values and not _equal(text.values[key], top.values[key]):
        top.complain(key, f"= {shown(top.values[key])}, but text_config says {shown(text.values[key])}")
    return text if key in text.values else top


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and one == other
    except RecursionError:
        return False
