"""Whether arguments fit the JSON schemas that the generators write: the few keywords that they use, nothing to install."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEYWORDS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "enum",
        "minimum",
        "maximum",
        "items",
        "minItems",
        "description",
    )
)

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def misfits(schema: Mapping[str, Any], value: Any, where: str = "$") -> Iterator[str]:
    """Everything in a value that its schema does not allow.

    Raises:
      ValueError: the schema uses a keyword that is not built here.
    """
    unknown = sorted(schema.keys() - KEYWORDS)
    if unknown:
        raise ValueError(f"{where}: schema keyword {', '.join(unknown)}; built: {', '.join(sorted(KEYWORDS))}")
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        yield f"{where}: {json.dumps(value)} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {json.dumps(value)} is none of {json.dumps(schema['enum'])}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: {value} is less than {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{where}: {value} is more than {schema['maximum']}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            if name in known:
                yield from misfits(known[name], inner, f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{where}: {name} is not known"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where}: fewer than {schema['minItems']} items"
        for at, inner in enumerate(value):
            yield from misfits(schema.get("items", {}), inner, f"{where}[{at}]")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which Python counts as an integer
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])
