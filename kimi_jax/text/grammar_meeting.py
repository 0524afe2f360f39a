"""How many schemas must hold together for one value: what a search for such values costs grows by a factor with each."""

from collections.abc import Iterator, Mapping
from typing import Any

MEETING = 6
"""Patterns and formats that may have to hold for one string: whether any string fits all of them is searched for.

Each more than triples time and memory of the compilation: 10 take 50 ms, 14 take 7 s, 20 do not end.
"""

PATTERN_PROPERTIES = 64
"""Of a whole schema: every two of one object are searched for a name that fits both."""

_NAMED = ("properties", "patternProperties", "dependentSchemas")  # name -> schema
_HERE = ("allOf", "anyOf", "oneOf")
_SILENT = ("const", "enum", "default", "examples", "title", "description", "$comment", "$id", "$schema", "$ref")
_LATER = ("$defs", "definitions")  # count where they are referred to

Schema = Mapping[str, Any]


class Meeting:
    """Counts over one schema.

    Args:
      root: the schema.
      references: what its ``$ref`` name; those that name nothing are left out.

    Attributes:
      most: schemas that may have to hold together, as if all that meet on one level met all that meet on the next.
      patterns: different patterns and formats.
      names: patternProperties.
    """

    def __init__(self, root: Any, references: Mapping[str, Any]) -> None:
        self._references = references
        self._known: dict[int, tuple[int, int]] = {}
        here, below = self._count(root)
        self.most = max(here, 1) * below
        found = list(_objects(root))
        keys = [key for node in found if isinstance(given := node.get("patternProperties"), Mapping) for key in given]
        written = {(key, str(node[key])) for node in found for key in ("pattern", "format") if key in node}
        self.patterns, self.names = len(written | {("pattern", key) for key in keys}), len(keys)

    def _count(self, root: Any) -> tuple[int, int]:
        """Schemas that hold together at the root, and the most of them for any value inside; without recursion."""
        waiting, opened = [root], set[int]()
        while waiting:
            schema = waiting[-1]
            if isinstance(schema, Mapping) and id(schema) not in opened:
                opened.add(id(schema))
                waiting += [inner for _, inner in self._parts(schema) if id(inner) not in opened]
                continue
            waiting.pop()
            if isinstance(schema, Mapping) and id(schema) not in self._known:
                self._known[id(schema)] = self._counted(schema)
        return self._of(root)

    def _of(self, schema: Any) -> tuple[int, int]:
        # one that is not counted yet contains itself
        return self._known.get(id(schema), (1, 1)) if isinstance(schema, Mapping) else (0, 1)

    def _counted(self, schema: Schema) -> tuple[int, int]:
        here, below = int(any(key not in (*_HERE, *_LATER, *_SILENT) for key in schema)), 1
        either = dict.fromkeys(_HERE, 0)
        for key, inner in self._parts(schema):
            count, deeper = self._of(inner)
            if key in ("anyOf", "oneOf"):
                either[key] = max(either[key], count)
            elif key in ("allOf", "$ref"):
                here += count
            else:
                deeper *= max(count, 1)
            below = max(below, deeper)
        return here + sum(either.values()), below

    def _parts(self, schema: Schema) -> Iterator[tuple[str, Any]]:
        """The schemas that a schema holds or refers to, each with its keyword."""
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str) and value in self._references:
                yield key, self._references[value]
            elif key in _SILENT or key in _LATER:
                continue
            elif isinstance(value, Mapping) and key not in _NAMED:
                yield key, value
            elif isinstance(value, Mapping | list):
                yield from ((key, inner) for inner in (value.values() if isinstance(value, Mapping) else value))


def _objects(root: Any) -> Iterator[Schema]:
    """Every object in a JSON value."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
