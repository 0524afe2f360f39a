"""The markup of a chat turn: four control tokens and the markers made of them.

Source: chat-format, sections 3, 6, 9 and 10.4.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
"""Names of the control tokens that frame a turn."""

IMAGE_SLOT = "<|kimi_image_placeholder|>"
"""Where an image would go when no image prompts are given. Not a token; client text is never searched for it."""

_SEALED = "\ufdd0\ufdd1\ufdd2\ufdd3"  # noncharacters: Unicode sets them aside for use inside a program

_CUT_MARKERS = (
    (OPEN, ""),
    (CLOSE, ""),
    (CLOSE, "think"),
    (OPEN, "response"),
    (CLOSE, "response"),
    (OPEN, "tools"),
    (CLOSE, "tools"),
    (CLOSE, "message"),
)


class Tag(NamedTuple):
    """An opening tag inside a text.

    Attributes:
      name: which tag.
      attributes: its text between name and separator, still escaped.
      start: position of its first character.
      end: position of the first character of its body.
    """

    name: str
    attributes: str
    start: int
    end: int


@dataclass(frozen=True)
class Markup:
    """How the four control tokens look in the text that a parser reads.

    Attributes:
      open: starts an opening tag.
      close: starts a closing tag.
      sep: ends a tag.
      end: ends the message.
    """

    open: str
    close: str
    sep: str
    end: str

    def opened(self, tag: str) -> str:
        return f"{self.open}{tag}{self.sep}"

    def closed(self, tag: str) -> str:
        return f"{self.close}{tag}{self.sep}"

    @cached_property
    def think_open(self) -> str:
        return self.opened("think")

    @cached_property
    def think_close(self) -> str:
        return self.closed("think")

    @cached_property
    def response_open(self) -> str:
        return self.opened("response")

    @cached_property
    def response_close(self) -> str:
        return self.closed("response")

    @cached_property
    def tools_open(self) -> str:
        return self.opened("tools")

    @cached_property
    def tools_close(self) -> str:
        return self.closed("tools")

    @cached_property
    def call_close(self) -> str:
        return self.closed("call")

    @cached_property
    def argument_close(self) -> str:
        return self.closed("argument")

    @cached_property
    def message_close(self) -> str:
        return self.closed("message")

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Everything that can end, or be removed from, text that is shown to a client."""
        return (
            self.think_open,
            self.think_close,
            self.response_open,
            self.response_close,
            self.tools_open,
            self.tools_close,
            self.call_close,
            self.argument_close,
            self.message_close,
            self.end,
        )

    @cached_property
    def longest(self) -> int:
        """Length of the longest marker, in characters."""
        return max(map(len, self.markers))

    @cached_property
    def cut_markers(self) -> tuple[str, ...]:
        """The parts of a marker, in whole tokens, at which generation may stop."""
        return tuple((self.open if token == OPEN else self.close) + tag for token, tag in _CUT_MARKERS)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        # A message can end inside a marker, which is then removed: so it is held until the end token is ruled out.
        held = [*self.markers, *(cut + self.end for cut in self.cut_markers)]
        return frozenset(marker[:size] for marker in held for size in range(1, len(marker)))

    @cached_property
    def _longest_prefix(self) -> int:
        return max(map(len, self._prefixes))

    def undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that may still grow into a marker."""
        sizes = range(min(len(text), self._longest_prefix), 0, -1)
        return next((size for size in sizes if text[-size:] in self._prefixes), 0)

    def without_cut_marker(self, text: str) -> str:
        """``text`` less the part of a marker at which generation stopped, if it stopped inside one."""
        cut = next((cut for cut in self.cut_markers if text.endswith(cut)), "")
        return text.removesuffix(cut)

    def next_tag(self, text: str, names: tuple[str, ...], start: int = 0) -> Tag | None:
        """The first complete opening tag from ``start`` on that has one of the names."""
        while (start := text.find(self.open, start)) >= 0:
            inside = start + len(self.open)
            name = next((name for name in names if text.startswith(name, inside)), None)
            if name is not None:
                after = inside + len(name)
                stop = text.find(self.sep, after)
                if stop < 0:
                    return None
                if stop == after or text[after].isspace():
                    return Tag(name, text[after:stop], start, stop + len(self.sep))
            start = inside
        return None

    def shown(self, text: str) -> str:
        """``text`` as a client may see it: control tokens that were left over are spelled out."""
        if self is SPELLED:
            return text
        return text.translate(_SPELLING)


SPELLED = Markup(OPEN, CLOSE, SEP, END)
"""Control tokens as their names. Text that merely spells a name looks the same."""

SEALED = Markup(*_SEALED)
"""Control tokens as characters that no text holds (`sealed`): only a real token can then act as a marker."""

_SPELLING = {ord(mark): name for mark, name in zip(_SEALED, (OPEN, CLOSE, SEP, END), strict=True)}
_UNSEAL = {ord(mark): "\N{REPLACEMENT CHARACTER}" for mark in _SEALED}
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def sealed(text: str) -> str:
    """Ordinary text made safe to stand beside `SEALED` marks."""
    return text.translate(_UNSEAL)


def escape(value: str) -> str:
    """An attribute value as it is written between quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def attributes(tag: str) -> dict[str, str]:
    """The attributes of an opening tag; anything that is not ``word="value"`` is passed over."""
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(tag)}


def image_prompt(width: int, height: int, tokens: int = 1) -> str:
    """The text of one picture of the given original size in pixels, wide enough for its tokens."""
    return f"<|media_begin|>image {width}x{height}<|media_content|>{'<|media_pad|>' * tokens}<|media_end|>"
