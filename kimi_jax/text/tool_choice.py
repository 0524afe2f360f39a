"""What a request says about calling tools. Source: chat-format, section 13."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kimi_jax.text.errors import ChatError, shown


class ToolChoice(NamedTuple):
    """A checked choice.

    Attributes:
      kind: "auto", "none", "required", or "named" for one function.
      name: the function of a named choice.
    """

    kind: Literal["auto", "none", "required", "named"]
    name: str | None = None


def resolve_tool_choice(tool_choice: Any, tools: Sequence[Any] | None) -> ToolChoice:
    """The choice of a request; "auto" with tools and "none" without when it makes none.

    Raises:
      ChatError: no such choice, a choice without tools, or a function that is not among the tools.
    """
    if tool_choice is None:
        return ToolChoice("auto" if tools else "none")
    if not tools:
        raise ChatError(
            f"tool_choice is {shown(tool_choice)} but the request has no tools; tools, or no tool_choice, works"
        )
    if tool_choice in ("auto", "none", "required"):
        return ToolChoice(tool_choice)
    name = _function_name(tool_choice)
    if name is None:
        raise ChatError(
            f'tool_choice is {shown(tool_choice)}; "auto", "none", "required" and '
            '{"type": "function", "function": {"name": ...}} work'
        )
    names = [known for tool in tools if (known := _function_name(tool)) is not None]
    if name not in names:
        raise ChatError(
            f"tool_choice names {shown(name)}; the tools of this request are {', '.join(map(shown, names[:20]))}"
        )
    return ToolChoice("named", name)


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
