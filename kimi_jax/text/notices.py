"""The system messages that the renderer writes itself. Source: chat-format, section 5.1.

The model was trained on these strings byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.text import jsontext
from kimi_jax.text.effort import EFFORTS
from kimi_jax.text.errors import ChatError, shown
from kimi_jax.text.segments import Segments, message_end, opened, plain

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def tool_declaration(tools: Any, where: str = "tools", *, later: bool = False) -> Segments:
    """The tools on offer, if any; ``later`` when a system message adds them in mid-conversation."""
    if not tools:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ChatError(f"{where} is {shown(tools)}; a list of tool objects works")
    strays = [
        f"{where}[{at}] is {shown(tool)}; an object works"
        for at, tool in enumerate(tools)
        if not isinstance(tool, Mapping)
    ]
    if strays:
        raise ChatError(*strays)
    yield from _notice("tool-declare", (_MORE_TOOLS if later else _TOOLS) + _fenced(list(tools), where))


def effort_notice(effort: Any) -> Segments:
    """How much to think."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise ChatError(f"effort is {shown(effort)}; values that work: {', '.join(EFFORTS)}, or null for no message")
    yield from _notice("thinking-effort", _EFFORT.format(effort))


def choice_notice(tool_choice: Any, tools: Any) -> Segments:
    """Whether tools must or must not be called; nothing for "auto", a named tool, or without tools."""
    if isinstance(tool_choice, Mapping) or tool_choice in (None, "auto"):
        return
    if not isinstance(tool_choice, str) or tool_choice not in _CHOICES:
        raise ChatError(f'tool_choice is {shown(tool_choice)}; "auto", "none", "required" and a named function work')
    if tools:
        yield from _notice("tool-choice", _CHOICES[tool_choice])


def format_notice(response_format: Any) -> Segments:
    """The form that the answer must have; nothing for plain text."""
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        yield from _notice("response-format", _FORMAT.format(kind))
    elif kind == "json_schema":
        schema = response_schema(response_format.get("json_schema"))
        body = _FORMAT.format(kind) + _SCHEMA + _fenced(schema, "response_format.json_schema")
        yield from _notice("response-format", body)
    elif kind != "text":
        given = response_format if kind is None else kind
        raise ChatError(
            f'response_format has type {shown(given)}; types that work: "text", "json_object", "json_schema"'
        )


def response_schema(given: Any) -> Any:
    """The schema in a response format's ``json_schema``. Raises ChatError where there is none."""
    if not isinstance(given, Mapping):
        raise ChatError(f"response_format.json_schema is {shown(given)}; an object with the schema under schema works")
    return next((given[key] for key in ("schema", "json_schema") if given.get(key) is not None), given)


def _fenced(value: Any, where: str) -> str:
    if reason := jsontext.refusal(value):
        raise ChatError(f"{where}: {reason}")
    written = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"```json\n{written}\n```"


def _notice(kind: str, body: str) -> Segments:
    yield from opened("message", role="system", type=kind)
    yield from plain(body.strip())
    yield from message_end()
