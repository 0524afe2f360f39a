"""How much the model is asked to think. Source: chat-format, section 7; K3.1 Pro notes, section 12."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kimi_jax.text.errors import ChatError, shown

EFFORTS = ("low", "high", "max")
"""What the renderer accepts; the text of the message names a fourth, which the released renderer refuses."""

REQUESTED = {**{effort: effort for effort in EFFORTS}, "medium": "high", "xhigh": "max"}
"""What a caller may ask for, and what the model is then told."""


class Thinking(NamedTuple):
    """The state that renderer and parser must share."""

    thinking: bool
    effort: str | None


def resolve_thinking(
    reasoning_effort: Any = None,
    template_kwargs: Any = None,
    thinking: Any = None,
    *,
    can_disable: bool = True,
) -> Thinking:
    """Thinking and effort of a request.

    Args:
      reasoning_effort: OpenAI's field: low, medium, high, xhigh, max or none; None when absent.
      template_kwargs: ``chat_template_kwargs``, of which ``thinking``, ``enable_thinking`` and ``thinking_effort`` are
        read.
      thinking: the vendor's field, ``{"type": "enabled"}`` or ``{"type": "disabled"}``.
      can_disable: whether the model may be asked not to think. K3: yes. K3.1 Pro: not by default.

    Raises:
      ChatError: a value that is none of these, all of them at once.
    """
    problems: list[str] = []
    kwargs = _mapping(template_kwargs, "chat_template_kwargs", problems)
    effort = "max"
    if reasoning_effort is not None and reasoning_effort != "none":
        effort = REQUESTED.get(reasoning_effort, "") if isinstance(reasoning_effort, str) else ""
        if not effort:
            values = ", ".join([*REQUESTED, "none"] if can_disable else REQUESTED)
            problems.append(f"reasoning_effort is {shown(reasoning_effort)}; values that work: {values}")
    switches = [
        _switch(kwargs, "thinking", problems),
        _switch(kwargs, "enable_thinking", problems),
        _vendor_switch(thinking, problems),
        False if reasoning_effort == "none" else None,
    ]
    on = next((switch for switch in switches if switch is not None), True)
    if not on and not can_disable:
        problems.append("this model always thinks; ask for less with reasoning_effort low")
    asked: str | None = effort
    if on and "thinking_effort" in kwargs:
        asked = kwargs["thinking_effort"]
        if asked is not None and asked not in EFFORTS:
            values = ", ".join(EFFORTS)
            problems.append(f"chat_template_kwargs.thinking_effort is {shown(asked)}; values that work: {values}, null")
    if problems:
        raise ChatError(*problems)
    return Thinking(on, asked)


def _mapping(value: Any, name: str, problems: list[str]) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    problems.append(f"{name} is of type {type(value).__name__}; an object works")
    return {}


def _switch(kwargs: Mapping[str, Any], name: str, problems: list[str]) -> bool | None:
    value = kwargs.get(name)
    if value is None or isinstance(value, bool):
        return value
    problems.append(f"chat_template_kwargs.{name} is {shown(value)}; true and false work")
    return None


def _vendor_switch(thinking: Any, problems: list[str]) -> bool | None:
    kind = _mapping(thinking, "thinking", problems).get("type")
    if kind not in (None, "enabled", "disabled"):
        problems.append(f"thinking.type is {shown(kind)}; enabled and disabled work")
        return None
    return None if kind is None else kind == "enabled"
