"""Grammar rules of tool calls: the tools element of a reply. Source: chat-format, sections 9 and 13."""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.text.errors import shown
from kimi_jax.text.grammar_rules import TEXT, Rules
from kimi_jax.text.grammar_schema import KINDS, SchemaError, check_schema, escaped, kinds, resolve, standalone
from kimi_jax.text.grammar_strings import RawStrings
from kimi_jax.text.segments import closed, opened
from kimi_jax.text.tokenizer import EncodeError

MAX_PROPERTIES = 64
"""Arguments of one strict tool: a set of them is a machine word of the grammar engine."""

_SILENT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_SILENT |= {"title", "description", "default", "examples", "$comment", "strict", "deprecated", "readOnly", "writeOnly"}
"""What the parameters of a strict tool may say without a rule of its own here."""


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the client wants the arguments of a tool to follow its schema."""
    return tool["function"].get("strict") is True


def tools_element(rules: Rules, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Adds the rules of an element that calls one of some tools, or ``several``; returns the name of the first.

    Args:
      rules: what they are added to.
      tools: checked; each has a function with a name.

    Raises:
      SchemaError: schemas of strict tools that cannot be enforced; each is one of its arguments, with its place.
    """
    problems, calls = [], []
    for number, tool in enumerate(tools):
        place = f"tool {shown(tool['function']['name'])}"
        try:
            calls.append(_call(rules, tool, number, place))
        except SchemaError as error:
            problems.extend(f"{place}: {reason}" for reason in error.args)
        except EncodeError as error:
            problems.append(f"{place}: {error}")
        except RecursionError:
            problems.append(f"{place}: its references lead too far")
    if problems:
        raise SchemaError(*problems)
    rules.add("INDEX", "/[1-9][0-9]{0,2}/")
    body = f"({' | '.join(calls)}){'+' if several else ''}"
    return rules.add("tools", f"{rules.ids(opened('tools'))} {body} {rules.ids(closed('tools'))}")


def _call(rules: Rules, tool: Mapping[str, Any], number: int, place: str) -> str:
    *head, _, quote, sep = opened("call", tool=tool["function"]["name"], index=1)
    arguments = _strict_arguments(rules, tool, number, place) if is_strict(tool) else f"{_any_argument(rules)}*"
    tag = f"{rules.ids(head)} INDEX {rules.ids([quote, sep])}"
    return rules.add(f"call{number}", f"{tag} {arguments} {rules.ids(closed('call'))}")


def _any_argument(rules: Rules) -> str:
    """An argument with any key and any value, as tools that are not strict may have."""
    rules.shared("KEY", r'/[^"\x00-\x1f]{1,256}/')
    values = []
    for kind in KINDS:
        value = TEXT if kind == "string" else rules.shared(f"any_{kind}", rules.json({"type": kind}))
        values.append(f"{_typed(rules, kind)} {value}")
    body = f"KEY ({' | '.join(values)}) {_argument_close(rules)}"
    return rules.shared("any_argument", f"{rules.ids(list(opened('argument', key='k'))[:4])} {body}")


def _strict_arguments(rules: Rules, tool: Mapping[str, Any], number: int, place: str) -> str:
    """The arguments of a strict tool: in any order, none twice, all that are required.

    The rule's parameter holds those that are written: a bit for each, the required ones first.
    """
    root = tool["function"].get("parameters")
    root = {} if root is None else root
    check_schema(root)
    pointer, schema = _object(root)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = list(dict.fromkeys([*required, *properties]))
    if len(names) > MAX_PROPERTIES:
        raise SchemaError(f"{len(names)} properties; up to {MAX_PROPERTIES} of a strict tool work")
    if not names:
        return ""
    rule = f"arguments{number}"
    ends = f'"" %if is_ones([0:{len(set(required))}])' if required else '""'
    options = [ends]
    problems: list[str] = []
    for bit, name in enumerate(names):
        part = f"{pointer}/properties/{escaped(name)}" if name in properties else None
        try:
            argument = _argument(rules, root, part, name, f"{number}_{bit}", place)
        except SchemaError as error:
            problems.append(f"property {shown(name)}: {error}")
        else:
            options.append(f"{argument} {rule}::set_bit({bit}) %if bit_clear({bit})")
    if problems:
        raise SchemaError(*problems)
    rules.add(f"{rule}::_", " | ".join(options), place)
    return f"{rule}::0x0"


def _argument(rules: Rules, root: Mapping[str, Any], pointer: str | None, key: str, label: str, place: str) -> str:
    """The rule of one argument: for each kind of value that its schema admits, the tag that says so and the value."""
    place = f"{place}, property {shown(key)}"
    schema = True if pointer is None else resolve(pointer, root)
    admitted = kinds(schema, root)
    if not admitted:
        raise SchemaError("no value satisfies it")
    values = []
    for kind in (kind for kind in KINDS if kind in admitted):
        if kind == "string":
            value = RawStrings(root).terminal(schema)
            value = TEXT if value == TEXT else rules.add(f"S{label}", value, place)
        else:
            part = {"type": kind} if pointer is None else standalone(root, pointer, kind if len(admitted) > 1 else None)
            value = rules.add(f"{kind}{label}", rules.json(part), place)
        values.append(f"{_typed(rules, kind)} {value}")
    head = rules.ids(list(opened("argument", key=key))[:-2])
    return rules.add(f"argument{label}", f"{head} ({' | '.join(values)}) {_argument_close(rules)}", place)


def _typed(rules: Rules, kind: str) -> str:
    """The rest of an argument's tag after its key."""
    return rules.shared(f"typed_{kind}", rules.ids(list(opened("argument", key="k", type=kind))[5:]))


def _argument_close(rules: Rules) -> str:
    return rules.shared("argument_close", rules.ids(closed("argument")))


def _object(root: Any) -> tuple[str, Mapping[str, Any]]:
    """Where the parameters of a tool are described, and their schema: an object whose properties are listed."""
    pointer, schema, seen = "#", root, set()
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        pointer = schema["$ref"]
        if pointer in seen:
            raise SchemaError(f"$ref {shown(pointer)} leads back to itself")
        if more := sorted(schema.keys() - _SILENT - {"$ref"}):
            raise SchemaError(f"{', '.join(more)} beside $ref cannot be enforced")
        seen.add(pointer)
        schema = resolve(pointer, root)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise SchemaError("the parameters of a strict tool are an object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    problems = [
        f"{keyword} cannot be enforced on the parameters themselves" for keyword in sorted(schema.keys() - _SILENT)
    ]
    if not isinstance(properties, Mapping):
        problems.append("properties is not an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        problems.append("required is not a list of names")
    if problems:
        raise SchemaError(*problems)
    return pointer, schema
