"""The pieces a prompt is made of: each is encoded by itself. Source: chat-format, section 3."""

from collections.abc import Iterator
from typing import NamedTuple

from kimi_jax.text.markup import CLOSE, END, OPEN, SEP, escape


class Segment(NamedTuple):
    """A text that is encoded by itself; only with ``markers`` do names of reserved ids in it become those ids."""

    text: str
    markers: bool


Segments = Iterator[Segment]


def plain(text: str) -> Segments:
    """Text from outside, data whatever it says. An empty text is no segment."""
    if text:
        yield Segment(text, False)


def opened(tag: str, **attributes: str | int) -> Segments:
    """An opening tag; attributes appear in the order given."""
    yield Segment(OPEN, True)
    yield Segment(tag, False)
    for name, value in attributes.items():
        yield from (Segment(f" {name}", False), Segment('="', False), *plain(escape(str(value))), Segment('"', False))
    yield Segment(SEP, True)


def closed(tag: str) -> Segments:
    """A closing tag."""
    yield Segment(CLOSE, True)
    yield Segment(tag, False)
    yield Segment(SEP, True)


def message_end() -> Segments:
    """The end of a message: its closing tag and the token that ends generation."""
    yield from closed("message")
    yield Segment(END, True)
