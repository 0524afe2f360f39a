"""JSON schemas as clients send them: limits, the kinds of value that they admit, and a part of one on its own."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import quote, unquote

from kimi_jax.text import jsontext
from kimi_jax.text.grammar_meeting import MEETING, PATTERN_PROPERTIES, Meeting

MAX_BYTES, MAX_DEPTH = 128 << 10, 32
"""Largest and deepest schema, as JSON text and in nested brackets."""

MAX_NESTING = 1024
"""Brackets that may be open at once when references are followed: the schema's own and those of all it refers to.

llguidance follows them by recursion and takes the process down at some thousands.
"""

KINDS = ("string", "number", "boolean", "null", "array", "object")
"""Types as the wire names them; its numbers include integers."""

_EVERY = frozenset(KINDS)
_DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_OWN = ("$id", "$schema")  # they speak about a schema that stands alone


class SchemaError(ValueError):
    """What is wrong with a schema."""


def check_schema(schema: Any) -> None:
    """Refuses what is too large to compile for a client.

    Raises:
      SchemaError: not a schema, or beyond a limit.
    """
    if not isinstance(schema, Mapping | bool):
        raise SchemaError(f"a schema is an object, not {type(schema).__name__}")
    if reason := jsontext.refusal(schema if isinstance(schema, bool) else dict(schema)):
        raise SchemaError(reason)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size, depth = len(text.encode()), jsontext.depth(text)
    except UnicodeEncodeError as error:
        raise SchemaError(f"half a surrogate pair, U+{ord(error.object[error.start]):04X}, is not text") from None
    except ValueError:
        raise SchemaError("numbers of a schema are finite") from None
    if size > MAX_BYTES:
        raise SchemaError(f"the schema has {size:,} bytes; up to {MAX_BYTES:,} work")
    if depth > MAX_DEPTH:
        raise SchemaError(f"the schema is nested {depth} deep; up to {MAX_DEPTH} work")
    references = _references(schema)
    nesting = _nesting(schema, references)
    if nesting > MAX_NESTING:
        raise SchemaError(f"the schema and its references nest up to {nesting:,} deep; up to {MAX_NESTING:,} work")
    _check_circles(references)
    meeting = Meeting(schema, references)
    if min(meeting.most, meeting.patterns) > MEETING:
        raise SchemaError(
            f"up to {meeting.most:,} schemas must hold for one value (allOf, $ref) and {meeting.patterns:,} patterns and formats "
            f"are given; up to {MEETING} of either work"
        )
    if meeting.names > PATTERN_PROPERTIES:
        raise SchemaError(f"the schema has {meeting.names:,} patternProperties; up to {PATTERN_PROPERTIES} work")


def resolve(reference: str, root: Any) -> Any:
    """The schema that a local reference names.

    Raises:
      SchemaError: it leads out of the schema, or nowhere.
    """
    if not reference.startswith("#"):
        raise SchemaError(f"$ref {reference[:60]!r} leads out of the schema; references like '#/$defs/name' work")
    if not re.fullmatch("#(/.*)?", reference, re.DOTALL):
        raise SchemaError(f"$ref {reference[:60]!r} is no path; references like '#/$defs/name' work")
    found = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise SchemaError(f"$ref {reference[:60]!r} names nothing in the schema")
    if not isinstance(found, Mapping | bool):
        raise SchemaError(f"$ref {reference[:60]!r} names no schema")
    return found


def _references(root: Any) -> dict[str, Any]:
    """What the references in a schema name. Those that name nothing are left out: that is told where they are followed."""
    found: dict[str, Any] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(value.values())
            if isinstance(reference := value.get("$ref"), str):
                with suppress(SchemaError):
                    found[reference] = resolve(reference, root)
        elif isinstance(value, list):
            waiting.extend(value)
    return found


def _check_circles(references: Mapping[str, Any]) -> None:
    """Refuses a reference that says nothing but itself: no value can be written from it."""
    graph = {name: set(_met(schema)) & references.keys() for name, schema in references.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise SchemaError(f"$ref {error.args[1][0][:60]!r} leads back to itself") from None


def _met(schema: Any) -> Iterator[str]:
    """The references that must hold for the very value that a schema is for."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from _met(branch)


def _nesting(root: Any, references: Mapping[str, Any]) -> int:
    """Brackets of the root and of everything that is referred to, each once."""
    depths: dict[int, int] = {}

    def depth(value: Any) -> int:
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        else:
            return 0
        depths[id(value)] = 1 + max(map(depth, inner), default=0)
        return depths[id(value)]

    return depth(root) + sum(depths.get(id(schema), 0) for schema in references.values())


def kinds(schema: Any, root: Any, known: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The kinds of value that may satisfy a schema; a kind too many is possible, one too few is not.

    Args:
      schema: part of ``root``.
      root: where references start.
      known: kinds of references met so far.
    """
    known = {} if known is None else known
    if isinstance(schema, bool):
        return _EVERY if schema else frozenset()
    if not isinstance(schema, Mapping):
        raise SchemaError(f"a schema is an object, not {type(schema).__name__}")
    found = _EVERY
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = _EVERY  # a schema that refers to itself says nothing by that
            known[reference] = kinds(resolve(reference, root), root, known)
        found &= known[reference]
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    if "const" in schema:
        found &= {kind(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {kind(value) for value in schema["enum"]}
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(branches, list):
            found &= frozenset().union(*(kinds(branch, root, known) for branch in branches))
    for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= kinds(branch, root, known)
    return found


def kind(value: Any) -> str:
    """The wire's name for the type of a JSON value."""
    if value is None:
        return "null"
    for name, types in (("boolean", bool), ("number", int | float), ("string", str), ("array", list | tuple)):
        if isinstance(value, types):
            return name
    return "object"


def standalone(root: Mapping[str, Any], pointer: str, only: str | None) -> dict[str, Any]:
    """A part of a schema as one that stands alone, its references kept working.

    Args:
      root: the whole schema.
      pointer: where the part is, as in ``#/properties/name``.
      only: the one kind of value wanted of several, or None for all.
    """
    part = resolve(pointer, root)
    wanted: list[Any] = [part] if only is None else [part, {"type": only}]
    if not _refers(part):
        return {"allOf": wanted} if only or not isinstance(part, Mapping) else dict(part)
    wanted[0] = {"$ref": _moved(pointer)}
    return {"allOf": wanted, "$defs": {"root": _rebased(root)}}


def escaped(name: str) -> str:
    """A name as a step of a reference, which is a URI."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _moved(reference: str) -> str:
    return f"#/$defs/root{reference[1:]}" if reference.startswith("#") else reference


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _rebased(schema: Any) -> Any:
    """The schema for a place below ``#/$defs/root``."""
    if isinstance(schema, list):
        return [_rebased(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OWN:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            moved[key] = {name: _rebased(item) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str):
            moved[key] = _moved(value)
        else:
            moved[key] = value if key in _DATA else _rebased(value)
    return moved
