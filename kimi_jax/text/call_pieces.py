"""The arguments of one tool call, sent while they are written.

The pieces add up to the JSON value of `calls.call_arguments`. What has been sent stays: a repeated key is written twice
(the last one counts), and a string that the end of the call cuts off is kept.
"""

from kimi_jax.text import jsontext
from kimi_jax.text.calls import argument_key, elements, is_string, object_text, value_text
from kimi_jax.text.markup import Markup


class CallPieces:
    """Turns the inside of a call element into JSON object text, strings as they come and other values when complete."""

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._text = ""  # not yet decided
        self._in_string = False
        self._started = False  # the opening brace is written
        self._whole = False  # a json element gave all arguments

    def push(self, text: str) -> str:
        """The next piece of JSON. ``text`` must not hold the end of the call."""
        self._text += text
        written: list[str] = []
        while not self._whole and (piece := self._step()) is not None:
            written.append(piece)
        return "".join(written)

    def finish(self) -> str:
        """The rest of the JSON: the call has ended."""
        if self._whole:
            return ""
        if self._in_string:
            return self._string(len(self._text)) + '"}'
        written = []
        for name, tag, text in elements(self._text, self._markup):
            written.append(self._element(name, tag, text))
            if self._whole:
                return "".join(written)
        return "".join([*written, "}" if self._started else "{}"])

    def _step(self) -> str | None:
        """What the text at hand adds, or None when it must wait for more."""
        if self._in_string:
            return self._step_string()
        tag = self._markup.next_tag(self._text, ("argument", "json"))
        if tag is None:
            return None
        if tag.name == "argument" and is_string(tag.attributes):
            self._text = self._text[tag.end :]
            self._in_string = True
            return f'{self._key(tag.attributes)}"'
        closing = self._markup.closed(tag.name)
        stop = self._text.find(closing, tag.end)
        if stop < 0:
            return None
        inner = self._text[tag.end : stop]
        self._text = self._text[stop + len(closing) :]
        return self._element(tag.name, tag.attributes, inner)

    def _step_string(self) -> str | None:
        stop = self._text.find(self._markup.argument_close)
        if stop >= 0:
            written = self._string(stop) + '"'
            self._text = self._text[len(self._markup.argument_close) :]
            self._in_string = False
            return written
        return self._string(len(self._text) - self._markup.undecided(self._text)) or None

    def _string(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return jsontext.quote(self._markup.shown(taken))[1:-1]

    def _element(self, name: str, tag: str, text: str) -> str:
        if name == "argument":
            return self._key(tag) + value_text(tag, text, self._markup)
        if self._started:
            return ""
        self._whole = True
        return object_text(text, self._markup)

    def _key(self, tag: str) -> str:
        lead = ", " if self._started else "{"
        self._started = True
        return f"{lead}{jsontext.quote(argument_key(tag, self._markup))}: "
