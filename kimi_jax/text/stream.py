"""A reply of the model, taken apart while it is written. Source: chat-format, section 11.

The deltas of any cutting add up to what `parse` makes of the whole text, but for two things that a stream cannot take
back: reasoning that turns out to be the answer (the answer then follows in full), and blank content before tool calls.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from kimi_jax.text.call_pieces import CallPieces
from kimi_jax.text.calls import call_arguments, call_name
from kimi_jax.text.markup import SPELLED, Markup
from kimi_jax.text.parse import answer, next_call, random_id


@dataclass(frozen=True)
class CallDelta:
    """News of one tool call: id and name come once, with the first; the pieces of ``arguments`` add up."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds to a reply; false when it adds nothing yet."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass
class _News:
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class StreamParser:
    """Reads a reply in pieces of any size. A state is a method that says whether there is more to do at once.

    Args:
      thinking: whether the prompt has opened the thinking element (the same state as the renderer's).
      tools: False when none were offered or the choice was "none": calls are then dropped.
      argument_pieces: send a call when its tag is complete and its arguments as they come. A call that is cut off has
        then been sent in part; without, it is not sent at all.
      markup: how control tokens appear in the text.
      new_id: called once per call.
    """

    def __init__(
        self,
        *,
        thinking: bool = True,
        tools: bool = True,
        argument_pieces: bool = False,
        markup: Markup = SPELLED,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self._thinking = thinking
        self._tools = tools
        self._by_pieces = argument_pieces and tools
        self._markup = markup
        self._new_id = new_id
        self._state: Callable[[], bool] = self._start
        self._text = ""  # not yet decided
        self._aside: list[str] = []  # undecided text before that, in which no marker begins
        self._seen = 0  # where in the text to look for the next marker
        self._last = False  # no more text will come
        self._thoughts: list[str] = []  # all reasoning so far, in case it was the answer
        self._index = 0
        self._open_call: CallPieces | None = None
        self._news = _News()

    def push(self, text: str) -> Delta:
        """Take the next piece of the reply. What follows the end token is ignored."""
        start = max(0, len(self._text) - len(self._markup.end) + 1)
        self._text += text
        end = self._text.find(self._markup.end, start)
        if end >= 0:
            self._text = self._text[:end]
            return self.finish()
        return self._advance()

    def finish(self) -> Delta:
        """No more text will come: give out what was held back, less a marker that was cut."""
        self._last = True
        delta = self._advance()
        self._text = ""
        self._state = self._ended
        return delta

    def _advance(self) -> Delta:
        while self._state():
            pass
        news, self._news = self._news, _News()
        return Delta("".join(news.reasoning), "".join(news.content), tuple(news.calls))

    def _start(self) -> bool:
        reopen = self._markup.think_open
        if not self._last and reopen != self._text and reopen.startswith(self._text):
            return False
        if self._text.startswith(reopen):
            return self._enter(self._think, len(reopen))
        return self._enter(self._think if self._thinking else self._lead, 0)

    def _think(self) -> bool:
        m = self._markup
        found = self._find(m.think_close, m.tools_open, m.response_open, m.response_close, m.message_close)
        if found is None:
            self._think_aloud(self._take_decided())
            return False
        self._think_aloud(self._take(found.start()))
        if found.group() == m.think_close:
            return self._enter(self._between, len(m.think_close))
        if found.group() == m.response_open:
            return self._enter(self._doubt, 0)
        if found.group() == m.tools_open:
            return self._enter(self._between, 0)
        self._text = "".join(self._thoughts) + self._text
        return self._enter(self._skipped, 0)

    def _doubt(self) -> bool:
        """The response was opened inside the thoughts: they ended there, unless their own end still follows."""
        found = self._find_held(self._markup.think_close, self._markup.tools_open)
        if found is None:
            return self._last and self._enter(self._between, 0)
        if found.group() == self._markup.think_close:
            self._think_aloud(self._take(found.start()))
            return self._enter(self._between, len(found.group()))
        return self._enter(self._between, 0)

    def _skipped(self) -> bool:
        """The answer was written where the thoughts should be; it is whole once tools or the end follow."""
        return self._settle(
            lambda text, at_end: answer(text.replace(self._markup.think_close, ""), at_end, self._markup)
        )

    def _between(self) -> bool:
        """The thoughts have ended. Text counts as content only if no response is opened after it."""
        found = self._find_held(self._markup.response_open, self._markup.tools_open)
        if found is not None and found.group() == self._markup.response_open:
            return self._enter(self._respond, found.end())
        return self._settle(lambda text, at_end: answer(text, at_end, self._markup))

    def _settle(self, content: Callable[[str, bool], str]) -> bool:
        found = self._find_held(self._markup.tools_open)
        if found is not None:
            self._say(content(self._take(found.start()), False))
            return self._enter(self._call, len(found.group()))
        if self._last:
            self._say(content(self._take(len(self._text)), True))
        return False

    def _lead(self) -> bool:
        """The prompt has opened the response; it may be opened again before any text."""
        text, m = self._text.lstrip(), self._markup
        if not self._last and text != m.response_open and m.response_open.startswith(text):
            return False
        if text.startswith(m.response_open):
            return self._enter(self._respond, len(self._text) - len(text) + len(m.response_open))
        return self._enter(self._plain, 0)

    def _plain(self) -> bool:
        m = self._markup
        found = self._find(m.response_open, m.response_close, m.message_close, m.tools_open)
        if found is None:
            self._say(self._take_decided())
            return False
        self._say(self._take(found.start()))
        return self._enter(self._call if found.group() == m.tools_open else self._plain, len(found.group()))

    def _respond(self) -> bool:
        m = self._markup
        found = self._find(m.response_close, m.message_close, m.tools_open)
        if found is None:
            self._say(self._take_decided())
            return False
        self._say(self._take(found.start()))
        if found.group() == m.response_close:
            return self._enter(self._responded, len(found.group()))
        return self._enter(self._call if found.group() == m.tools_open else self._respond, len(found.group()))

    def _responded(self) -> bool:
        found = self._find(self._markup.tools_open)
        if found is None:
            self._take_decided()
            return False
        return self._enter(self._call, found.end())

    def _call(self) -> bool:
        m = self._markup
        found = (self._find if self._by_pieces else self._find_held)(m.call_close, m.tools_close)
        if found is None:
            if self._by_pieces:
                self._stream_call(len(self._text) - m.undecided(self._text))
            return False
        if found.group() == m.tools_close:
            return self._enter(self._ended, len(self._text))
        if self._open_call is not None:
            self._stream_call(found.start())
            self._call_news(arguments=self._open_call.finish())
            self._open_call = None
            return self._enter(self._call, len(m.call_close))
        call = next_call(self._text[: found.end()], 0, m)
        if call is None:  # a tag that no separator ended before: the close belongs to it
            self._seen = found.end()
            return True
        name, body, end = call
        if name and self._tools:
            self._call_news(name, call_arguments(body, m))
        return self._enter(self._call, end)

    def _stream_call(self, stop: int) -> None:
        """Send what the text up to ``stop`` adds to the call in work."""
        if self._open_call is None:
            tag = self._markup.next_tag(self._text[:stop], ("call",))
            if tag is None or not (name := call_name(tag.attributes, self._markup)):
                return
            self._call_news(name)
            self._open_call = CallPieces(self._markup)
            self._take(tag.end)
            stop -= tag.end
        self._call_news(arguments=self._open_call.push(self._take(stop)))

    def _ended(self) -> bool:
        self._text = ""
        return False

    def _call_news(self, name: str | None = None, arguments: str = "") -> None:
        if name is not None:
            self._news.calls.append(CallDelta(self._index, self._new_id(), name, arguments))
            self._index += 1
        elif arguments:
            self._news.calls.append(CallDelta(self._index - 1, None, None, arguments))

    def _think_aloud(self, text: str) -> None:
        self._thoughts.append(text)
        if self._thinking:
            self._news.reasoning.append(self._markup.shown(text))

    def _say(self, text: str) -> None:
        self._news.content.append(self._markup.shown(text))

    def _find(self, *markers: str) -> re.Match[str] | None:
        """The first of the markers in the undecided text."""
        return _any_of(markers).search(self._text, self._seen)

    def _find_held(self, *markers: str) -> re.Match[str] | None:
        """The same for a state that holds all text until it finds one: what is searched is put aside."""
        found = self._find(*markers)
        if found is None and not self._last:
            decided = max(0, len(self._text) - self._markup.longest + 1)
            self._aside.append(self._take(decided))
            return None
        before = "".join(self._aside)
        self._aside.clear()
        self._text = before + self._text
        self._seen += len(before)
        return self._find(*markers)

    def _enter(self, state: Callable[[], bool], drop: int) -> bool:
        self._take(drop)
        self._state = state
        self._seen = 0
        return True

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        self._seen = max(0, self._seen - size)
        return taken

    def _take_decided(self) -> str:
        """The text that can no longer become part of a marker; at the end all of it, less a marker that was cut."""
        if not self._last:
            return self._take(len(self._text) - self._markup.undecided(self._text))
        return self._markup.without_cut_marker(self._take(len(self._text)))
