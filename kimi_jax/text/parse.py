"""A complete reply of the model, taken apart. Source: chat-format, section 10.

Nothing in here raises: a model may write anything, and what can be read is returned. `stream` does it by pieces.
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_jax.text.calls import call_arguments, call_name
from kimi_jax.text.markup import SPELLED, Markup


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; ``arguments`` is JSON text, or what the model wrote in its place."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What a client sees of a reply. None where there is nothing."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]


def random_id() -> str:
    """An id for a tool call, unique across conversations and servers."""
    return f"call_{uuid.uuid4().hex}"


def parse(
    text: str,
    *,
    thinking: bool = True,
    tools: bool = True,
    markup: Markup = SPELLED,
    new_id: Callable[[], str] = random_id,
) -> Reply:
    """Reasoning, content and tool calls of a complete reply.

    Args:
      text: everything after the generation prompt, control tokens included in the given markup.
      thinking: whether the prompt has opened the thinking element (the same state as the renderer's).
      tools: False when none were offered or the choice was "none": calls are then dropped.
      markup: how control tokens appear in ``text``.
      new_id: called once per returned call.
    """
    text = text.partition(markup.end)[0]
    reasoning, content, section = channels(text, thinking, markup)
    found = tuple(ToolCall(new_id(), name, arguments) for name, arguments in calls(section, markup)) if tools else ()
    if found and not content.strip():
        content = ""
    return Reply(markup.shown(reasoning) or None, markup.shown(content) or None, found)


def channels(text: str, thinking: bool, markup: Markup) -> tuple[str, str, str]:
    """Reasoning, content and the inside of the tools element of a reply without its end token."""
    reopened = text.startswith(markup.think_open)
    if not (thinking or reopened):
        before, found, after = text.partition(markup.tools_open)
        return "", plain_answer(before, not found, markup), after.partition(markup.tools_close)[0]

    body = text.removeprefix(markup.think_open)
    end = reasoning_end(body, markup)
    reasoning, rest = body[:end], body[end:]
    if end == len(body):
        reasoning = markup.without_cut_marker(body)
    elif rest.startswith(markup.think_close):
        rest = rest.removeprefix(markup.think_close)
    before, found, after = rest.partition(markup.tools_open)
    if end == 0 and skipped_thoughts(body, markup):
        before = before.replace(markup.think_close, "")
    return reasoning if thinking else "", answer(before, not found, markup), after.partition(markup.tools_close)[0]


def skipped_thoughts(body: str, markup: Markup) -> bool:
    """Whether an answer was written where the thoughts should be: it is closed before any other channel is named."""
    closed = _first(body, markup.response_close, markup.message_close)
    return closed < _first(body, markup.think_close, markup.response_open, markup.tools_open)


def reasoning_end(body: str, markup: Markup) -> int:
    """Where the thoughts end, given a text that starts inside the thinking element."""
    if skipped_thoughts(body, markup):
        return 0
    closed, opened = _first(body, markup.think_close), _first(body, markup.response_open)
    tools = _first(body, markup.tools_open)
    return min(opened, tools) if tools < closed or closed == len(body) else closed


def answer(before: str, at_end: bool, markup: Markup) -> str:
    """Content of what stands between thoughts and tools; ``at_end`` when no tools follow, so that it may be cut."""
    _, opened, inside = before.partition(markup.response_open)
    text, closed, _ = inside.partition(markup.response_close) if opened else (before, "", "")
    if at_end and not closed:
        text = markup.without_cut_marker(text)
    if not opened:
        text = text.replace(markup.response_close, "")
    return text.replace(markup.message_close, "")


def plain_answer(before: str, at_end: bool, markup: Markup) -> str:
    """Content when the prompt has already opened the response.

    Opening it again counts only before any text: a stream cannot take back what it has sent.
    """
    lead, opened, _ = before.partition(markup.response_open)
    if opened and not lead.strip():
        return answer(before, at_end, markup)
    if at_end:
        before = markup.without_cut_marker(before)
    for stray in (markup.response_open, markup.response_close, markup.message_close):
        before = before.replace(stray, "")
    return before


def calls(section: str, markup: Markup) -> Iterator[tuple[str, str]]:
    """Names and arguments of the complete calls inside the tools element; calls that name no tool are left out."""
    start = 0
    while found := next_call(section, start, markup):
        name, body, start = found
        if name:
            yield name, call_arguments(body, markup)


def next_call(section: str, start: int, markup: Markup) -> tuple[str, str, int] | None:
    """The first complete call from ``start`` on: (name, inner text, where it ends)."""
    tag = markup.next_tag(section, ("call",), start)
    if tag is None:
        return None
    stop = section.find(markup.call_close, tag.end)
    if stop < 0:
        return None
    return call_name(tag.attributes, markup), section[tag.end : stop], stop + len(markup.call_close)


def _first(text: str, *markers: str) -> int:
    """Position of the first of the markers; the length of the text when there is none."""
    return min((at for marker in markers if (at := text.find(marker)) >= 0), default=len(text))
