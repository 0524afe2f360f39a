"""Chat messages to the segments of a prompt. Source: chat-format, sections 4 to 6.

Only this module and those it calls write markup. Whatever a client sends is data, encoded with markers off.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kimi_jax.text import jsontext
from kimi_jax.text.errors import ChatError, shown
from kimi_jax.text.markup import IMAGE_SLOT
from kimi_jax.text.notices import choice_notice, effort_notice, format_notice, tool_declaration
from kimi_jax.text.segments import Segment, Segments, closed, message_end, opened, plain
from kimi_jax.text.tool_results import Message, Placed, placed

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of a request -> role in the prompt."""

_IMAGE_PARTS = ("image", "image_url")


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = "max",
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """The prompt of a conversation, in segments for `Tokenizer.encode_segments`. The arguments are not modified.

    Args:
      messages: OpenAI's form; ``reasoning_content`` or ``reasoning`` holds the thoughts of assistant messages.
      tools: declared as they are, so pass on what the client sent.
      thinking: whether the model thinks; the parser must be given the same.
      effort: low, high or max; None for no message about it. Ignored without thinking.
      tool_choice: "required" and "none" are told to the model when there are tools.
      response_format: json_object and json_schema are told to the model.
      add_generation_prompt: open the assistant's message at the end.
      image_prompts: one `markup.image_prompt` for each image part, in order of the prompt. Client text is never
        searched for image places. None leaves the literal placeholder, which means nothing to the model.

    Raises:
      ChatError: everything that is wrong, each with its place in the request.
    """
    problems: list[str] = []
    segments: list[Segment] = []
    images = _Images(image_prompts)

    def add(place: str, part: Callable[[], Segments]) -> None:
        try:
            new = list(part())
        except ChatError as error:
            problems.extend(error.problems)
        else:
            problems.extend(f"{place}: {reason}" for reason in _broken_text(new))
            segments.extend(new)

    add("tools", lambda: tool_declaration(tools))
    if thinking and effort is not None:
        add("effort", lambda: effort_notice(effort))
    for item in placed(_messages(messages)):
        if isinstance(item, ChatError):
            problems.extend(item.problems)
        else:
            add(f"messages[{item.index}]", lambda item=item: _message(item, thinking, images))
    problems.extend([] if problems else images.problems())  # a refused message has not asked for its images
    add("tool_choice", lambda: choice_notice(tool_choice, tools))
    add("response_format", lambda: format_notice(response_format))
    if problems:
        raise ChatError(*problems)
    if add_generation_prompt:
        segments += [*opened("message", role="assistant"), *opened("think" if thinking else "response")]
    return segments


class _Images:
    """Gives the image prompts out, one for each image part."""

    def __init__(self, prompts: Sequence[str] | None) -> None:
        self._prompts = prompts
        self._slots = 0

    def next(self) -> Segment:
        self._slots += 1
        if self._prompts is None:
            return Segment(IMAGE_SLOT, True)
        return Segment(self._prompts[self._slots - 1] if self._slots <= len(self._prompts) else "", True)

    def problems(self) -> list[str]:
        if self._prompts is None or self._slots == len(self._prompts):
            return []
        return [
            f"messages have {self._slots} image parts for {len(self._prompts)} images; one part for each image works"
        ]


def _messages(messages: Any) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        given = "empty" if isinstance(messages, list | tuple) else shown(messages)
        raise ChatError(f"messages is {given}; a list of at least one message object works")
    strays = [
        f"messages[{at}] is {shown(one)}; an object works"
        for at, one in enumerate(messages)
        if not isinstance(one, Mapping)
    ]
    if strays:
        raise ChatError(*strays)
    return messages


def _broken_text(segments: list[Segment]) -> Iterator[str]:
    for segment in segments:
        try:
            segment.text.encode()
        except UnicodeEncodeError as error:
            yield f"half a surrogate pair, U+{ord(segment.text[error.start]):04X}, is not text; send whole characters"


def _message(item: Placed, thinking: bool, images: _Images) -> Segments:
    message, where = item.message, f"messages[{item.index}]"
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise ChatError(f"{where} has role {shown(given)}; roles that work: {', '.join(ROLES)}")
    if role == "system" and message.get("tools"):
        yield from tool_declaration(message["tools"], f"{where}.tools", later=True)
        return
    if role == "tool":
        yield from opened("message", role="tool", tool=item.tool or "", index=item.number)
        yield from _content(message, where, images)
    else:
        yield from opened("message", role=role, **_name(message, where))
        if role == "assistant":
            yield from _assistant(message, where, thinking, images)
        else:
            yield from _content(message, where, images)
    yield from message_end()


def _name(message: Message, where: str) -> dict[str, str]:
    name = message.get("name")
    if not name:
        return {}
    return {"name": _text(name, f"{where}.name")}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ChatError(f"{where} is {shown(value)}; a string works")
    return value


def _content(message: Message, where: str, images: _Images) -> Segments:
    content = message.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield from plain(content)
        return
    if not isinstance(content, list | tuple):
        raise ChatError(f"{where}.content is {shown(content)}; a string, a list of parts, or null works")
    for at, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ChatError(
                f'{where}.content[{at}] is {shown(part)}; an object like {{"type": "text", "text": ...}} works'
            )
        if part.get("type") in _IMAGE_PARTS:
            yield images.next()
        elif isinstance(part.get("text"), str):
            yield from plain(part["text"])
        else:
            raise ChatError(
                f"{where}.content[{at}] is a part of type {shown(part.get('type'))} without text; "
                f"text, {' and '.join(_IMAGE_PARTS)} parts work"
            )


def _assistant(message: Message, where: str, thinking: bool, images: _Images) -> Segments:
    if thinking:
        key = "reasoning_content" if message.get("reasoning_content") else "reasoning"
        thoughts = _text(message.get(key) or "", f"{where}.{key}")
        yield from opened("think")
        yield from plain(thoughts if thoughts.strip() else "")
        yield from closed("think")
    yield from opened("response")
    yield from _content(message, where, images)
    yield from closed("response")
    if message.get("function_call"):
        raise ChatError(f"{where}.function_call is not read; tool_calls works")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise ChatError(f"{where}.tool_calls is {shown(calls)}; a list of call objects works")
        yield from opened("tools")
        for at, call in enumerate(calls):
            yield from _call(call, at + 1, f"{where}.tool_calls[{at}]")
        yield from closed("tools")


def _call(call: Any, number: int, where: str) -> Segments:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"{where} has no function object; {{name, arguments}} works")
    name = function.get("name")
    if not name:
        raise ChatError(f"{where}.function.name is {shown(name)}; the name of a function works")
    yield from opened("call", tool=_text(name, f"{where}.function.name"), index=number)
    yield from _arguments(function.get("arguments"), f"{where}.function.arguments")
    yield from closed("call")


def _arguments(given: Any, where: str) -> Segments:
    """The arguments of a call. A string that cannot be read as JSON goes in raw: it may be the model's own."""
    if given is None:
        return
    if not isinstance(given, str):
        yield from _members(given, where)
        return
    if not given.strip():
        return
    try:
        if jsontext.depth(given) > jsontext.MAX_DEPTH:
            raise ValueError("too deep")
        value = json.loads(given)
    except ValueError:
        yield from _raw(given)
        return
    segments = list(_members(value, where))
    yield from _raw(given) if any(True for _ in _broken_text(segments)) else iter(segments)


def _raw(given: str) -> Segments:
    yield from opened("json", type="object")
    yield from plain(given)
    yield from closed("json")


def _members(value: Any, where: str) -> Segments:
    if not isinstance(value, Mapping):
        raise ChatError(f"{where} is JSON of type {_kind(value) or type(value).__name__}; an object works")
    if reason := jsontext.refusal(dict(value)):
        raise ChatError(f"{where}: {reason}")
    for key, item in value.items():
        yield from opened("argument", key=key, type=_kind(item))
        yield from plain(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False))
        yield from closed("argument")


def _kind(value: Any) -> str:
    """The wire's name for the type of a JSON value."""
    if value is None:
        return "null"
    for name, types in (("boolean", bool), ("number", int | float), ("string", str), ("array", list | tuple)):
        if isinstance(value, types):
            return name
    return "object" if isinstance(value, Mapping) else ""
