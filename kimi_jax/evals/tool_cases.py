"""Requests that ask for tool calls: made from a seed, or read from a file."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimi_jax.problems import ProblemsError

Schema = dict[str, Any]

KINDS = ("auto", "required", "named", "strict")
"""How the cases that are made ask for a call, in turn."""

_CITIES = ("Oslo", "São Paulo", "北京", "New York", "Århus", "Zürich")
_PEOPLE = ("Ada", "Björn", "Chidi", "Élodie", "Farid")


def made_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Request bodies, the same for the same seed. Each offers some tools of which one fits the message."""
    chance = random.Random(seed)
    return [_case(chance, number) for number in range(count)]


def read_cases(file: Path, limit: int | None) -> list[dict[str, Any]]:
    """Request bodies from a file, one JSON object a line, each with messages and tools.

    Raises:
      ProblemsError: lines that are none.
    """
    cases, problems = [], []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip() or (limit and len(cases) == limit):
                    continue
                try:
                    case = json.loads(line)
                except ValueError as error:
                    problems.append(f"line {number} is no JSON: {error}")
                    continue
                if not _is_case(case):
                    problems.append(f"line {number} has no lists of messages and of tools with names")
                    continue
                cases.append(case)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(str(error))
    if problems:
        raise ProblemsError(f"{file} holds no cases", problems[:10], "One request body a line works.")
    return cases


def _is_case(case: Any) -> bool:
    if not isinstance(case, dict) or not all(isinstance(case.get(key), list) for key in ("messages", "tools")):
        return False
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in case["tools"]]
    return all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions)


def _case(chance: random.Random, number: int) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    offered = chance.sample(_TOOLS, chance.randint(1, 4))
    name, _, ask, _ = chance.choice(offered)
    tools = [_tool(*tool, strict=kind == "strict") for tool in offered]
    choices: dict[str, Any] = {"required": "required", "named": {"type": "function", "function": {"name": name}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": ask(chance)}], "tools": tools}
    return body | ({"tool_choice": choices[kind]} if kind in choices else {})


def _tool(name: str, description: str, _: Any, schema: Schema, *, strict: bool) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def _record(required: str, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _texts(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_TEXT: Schema = {"type": "string"}
_DATE: Schema = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "description": "YYYY-MM-DD"}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


Ask = Callable[[random.Random], str]

_TOOLS: tuple[tuple[str, str, Ask, Schema], ...] = (
    (
        "get_weather",
        "Weather forecast of a city.",
        lambda c: f"What will the weather be in {c.choice(_CITIES)} for the next {c.randint(2, 7)} days, in Celsius?",
        _record("city days", city=_TEXT, days=_whole(1, 14), unit=_texts("celsius", "fahrenheit")),
    ),
    (
        "convert_currency",
        "Converts an amount of money.",
        lambda c: f"How much are {c.randint(5, 900)}.{c.randint(10, 99)} euros in yen?",
        _record("amount source target", amount={"type": "number"}, source=_TEXT, target=_TEXT),
    ),
    (
        "book_table",
        "Books a table in a restaurant.",
        lambda c: (
            f"A table for {c.randint(2, 8)} in {c.choice(_CITIES)} on 2026-12-{c.randint(10, 28)}, outside please."
        ),
        _record("place date seats", place=_TEXT, date=_DATE, seats=_whole(1, 20), outside={"type": "boolean"}),
    ),
    (
        "send_message",
        "Sends a message to some people.",
        lambda c: f'Write to {" and ".join(c.sample(_PEOPLE, 2))}: "Lunch at {c.randint(11, 14)}:30?" It is urgent.',
        _record(
            "to text",
            to=_list(_TEXT, minItems=1),
            text=_TEXT,
            priority={"type": ["string", "null"], "enum": ["low", "high", None]},
        ),
    ),
    (
        "search_papers",
        "Searches a library of papers.",
        lambda c: f"Find {c.randint(3, 9)} papers on linear attention since {c.randint(2018, 2025)}, newest first.",
        _record(
            "query filter",
            query=_TEXT,
            filter=_record("since", since=_whole(1900, 2100), topics=_list(_TEXT)),
            limit=_whole(1, 50),
            order=_texts("newest", "cited"),
        ),
    ),
    (
        "add_events",
        "Adds events to a calendar.",
        lambda c: (
            f"Put a call with {c.choice(_PEOPLE)} at 10:00 and tennis at {c.randint(16, 19)}:00 into my calendar."
        ),
        _record("events", events=_list({"$ref": "#/$defs/event"}, minItems=1))
        | {
            "$defs": {
                "event": _record("title hour", title=_TEXT, hour=_whole(0, 23), notes={"type": ["string", "null"]})
            }
        },
    ),
    (
        "run_query",
        "Runs a read-only SQL query.",
        lambda c: f'How many orders above {c.randint(10, 99)} € does the table "orders" have? Ask the database.',
        _record("sql", sql=_TEXT, parameters={"type": "object", "additionalProperties": {"type": "number"}}),
    ),
    ("current_time", "The time of now, in UTC.", lambda c: "What time is it?", _record("")),
)


def kinds(cases: list[dict[str, Any]]) -> Iterator[str]:
    """How each case asks for a call."""
    for case in cases:
        choice = case.get("tool_choice")
        if isinstance(choice, dict):
            yield "named"
        elif choice == "required":
            yield "required"
        else:
            yield "strict" if any((tool.get("function") or {}).get("strict") for tool in case["tools"]) else "auto"
