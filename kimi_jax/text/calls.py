"""One tool call of the wire, decoded. Source: chat-format, section 10.1."""

from collections.abc import Iterator

from kimi_jax.text import jsontext
from kimi_jax.text.markup import Markup, attributes


def call_name(tag: str, markup: Markup) -> str:
    """The tool that a call's opening tag names; empty if it names none."""
    return markup.shown(attributes(tag).get("tool", ""))


def call_arguments(body: str, markup: Markup) -> str:
    """The arguments of a call as JSON object text; its first complete element says which of the two forms they have."""
    values: dict[str, str] = {}
    for name, tag, text in elements(body, markup):
        if name == "json" and not values:
            return object_text(text, markup)
        if name == "argument":
            values[argument_key(tag, markup)] = value_text(tag, text, markup)
    return jsontext.members(values)


def elements(body: str, markup: Markup) -> Iterator[tuple[str, str, str]]:
    """The complete ``argument`` and ``json`` elements of a call: (name, attribute text, inner text)."""
    start = 0
    unclosed: set[str] = set()
    while tag := markup.next_tag(body, ("argument", "json"), start):
        start = tag.end
        if tag.name in unclosed:
            continue
        closing = markup.closed(tag.name)
        stop = body.find(closing, start)
        if stop < 0:
            unclosed.add(tag.name)
            continue
        yield tag.name, tag.attributes, body[start:stop]
        start = stop + len(closing)


def argument_key(tag: str, markup: Markup) -> str:
    """The key that an argument's opening tag gives; empty if it gives none."""
    return markup.shown(attributes(tag).get("key", ""))


def is_string(tag: str) -> bool:
    """Whether an argument's text is the value itself; otherwise it is JSON."""
    return attributes(tag).get("type", "string") == "string"


def value_text(tag: str, text: str, markup: Markup) -> str:
    """An argument's value as JSON text. What claims to be JSON and is not stays a string, as it was written."""
    text = markup.shown(text)
    if not is_string(tag):
        try:
            return jsontext.write(jsontext.read(text))
        except ValueError:
            pass
    return jsontext.quote(text)


def object_text(text: str, markup: Markup) -> str:
    """All arguments at once: an object in the style of the wire, or the text as it is when it is not one."""
    text = markup.shown(text)
    try:
        value = jsontext.read(text)
    except ValueError:
        return text
    return jsontext.write(value) if isinstance(value, dict) else text
