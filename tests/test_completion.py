"""From drawn ids to text, thoughts and calls: what is streamed adds up to what is returned, however tokens cut it."""

import json
import tempfile
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.completion import AnswerBuilder, Completion, Piece, Reading
from kimi_jax.engine.request import Event
from kimi_jax.testing.tokenizer import write_tiny_tokenizer
from kimi_jax.text.markup import CLOSE, END, OPEN, SEALED, SEP
from kimi_jax.text.tokenizer import Tokenizer

with tempfile.TemporaryDirectory() as folder:
    TINY = Tokenizer.from_folder(write_tiny_tokenizer(folder))

ENDS = TINY.stop_ids
"""End of message, [EOS] and [EOT]."""

HAND = TINY.encode("👋")
assert len(HAND) == 4


def ids(text: str) -> list[int]:
    """The ids of a text in which the names of control tokens stand for them."""
    return TINY.encode(text, markers=True)


def opened(tag: str) -> str:
    return f"{OPEN}{tag}{SEP}"


def closed(tag: str) -> str:
    return f"{CLOSE}{tag}{SEP}"


THOUGHT = "Two plus two." + closed("think")
ANSWER = opened("response") + "It is 4." + closed("response")
CALL = (
    opened('call tool="weather" index="1"')
    + opened('argument key="city" type="string"')
    + "Oslo"
    + closed("argument")
    + opened('argument key="days" type="number"')
    + "2"
    + closed("argument")
    + closed("call")
)
CALLS = opened("tools") + CALL + closed("tools")
DONE = closed("message") + END


class Answer(NamedTuple):
    """What one stream gave."""

    pieces: list[Piece]
    completion: Completion
    builder: AnswerBuilder

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def calls(self) -> list[tuple[str | None, str]]:
        return [(call.name, call.arguments) for piece in self.pieces for call in piece.tool_calls]


def run(numbers: list[int], finish: str = "length", **options) -> Answer:
    """Streams some ids through a builder; the last one carries the end."""
    options = {"tokenizer": TINY, "chat": True, "stop_ids": ENDS, "tools": True, **options}
    builder = AnswerBuilder(Reading(**options), prompt_tokens=7)
    pieces = []
    for place, number in enumerate(numbers):
        last = place == len(numbers) - 1
        pieces.append(builder.push(Event(0, number, -0.5 * place, finish if last else None)))
        if builder.finished:
            break
    return Answer(pieces, builder.completion(logprobs=True), builder)


class TestChannels:
    def test_thoughts_and_answer(self):
        answer = run(ids(THOUGHT + ANSWER + DONE), "stop")
        done = answer.completion
        assert (done.reasoning, done.text, done.finish_reason) == ("Two plus two.", "It is 4.", "stop")
        assert (answer.reasoning, answer.text) == ("Two plus two.", "It is 4.")
        assert done.tool_calls == ()
        thoughts = len(ids("Two plus two."))
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, len(ids(THOUGHT + ANSWER + DONE)))
        assert (done.usage.reasoning_tokens, done.usage.total_tokens) == (thoughts, 7 + done.usage.completion_tokens)

    def test_without_thinking(self):
        done = run(ids("It is 4." + closed("response") + DONE), "stop", thinking=False).completion
        assert (done.reasoning, done.text, done.usage.reasoning_tokens) == (None, "It is 4.", 0)

    def test_calls(self):
        answer = run(ids(THOUGHT + opened("response") + closed("response") + CALLS + DONE), "stop")
        (call,) = answer.completion.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 2})
        assert answer.calls == [(call.name, call.arguments)]
        assert answer.completion.text == answer.text == ""

    def test_calls_that_were_not_offered_are_dropped(self):
        answer = run(ids(THOUGHT + ANSWER + CALLS + DONE), "stop", tools=False)
        assert (answer.completion.tool_calls, answer.calls, answer.completion.finish_reason) == ((), [], "stop")
        assert answer.text == answer.completion.text == "It is 4."

    def test_plain_text_has_no_channels(self):
        answer = run(ids("a" + closed("think") + "b"), chat=False)
        assert answer.text == answer.completion.text == "a<|close|>think<|sep|>b"
        assert answer.completion.reasoning is None

    def test_text_that_spells_a_marker_is_text(self):  # PF-51
        spelled = TINY.encode(closed("think"), markers=False)
        answer = run([*spelled, *ids(closed("think") + opened("response") + "b")])
        assert (answer.completion.reasoning, answer.completion.text) == ("<|close|>think<|sep|>", "b")

    def test_a_marker_that_is_cut_leaves_no_text(self):
        for cut in (ids(OPEN), ids(OPEN + "response"), ids(CLOSE + "response")):
            answer = run([*ids(THOUGHT + opened("response") + "It"), *cut])
            assert answer.text == answer.completion.text == "It"

    def test_ids_alone(self):
        answer = run([5, 6, 7], tokenizer=None, chat=False)
        assert (answer.completion.text, answer.completion.token_ids, answer.text) == ("", (5, 6, 7), "")
        assert [piece.token_ids for piece in answer.pieces] == [(5,), (6,), (7,)]


class TestFinish:
    @pytest.mark.parametrize(
        ("text", "finish", "reason"),
        [
            (THOUGHT + ANSWER + DONE, "stop", "stop"),
            (THOUGHT + ANSWER, "length", "length"),
            (THOUGHT + ANSWER, "error", "error"),
            (THOUGHT + CALLS + DONE, "stop", "tool_calls"),
            (THOUGHT + CALLS, "length", "length"),  # also when calls were read
            (THOUGHT + opened("tools") + CALL.removesuffix(closed("call")) + DONE, "stop", "stop"),  # no whole call
        ],
    )
    def test_reasons(self, text, finish, reason):
        answer = run(ids(text), finish)
        assert answer.completion.finish_reason == reason
        assert [piece.finish_reason for piece in answer.pieces] == [None] * (len(answer.pieces) - 1) + [reason]

    def test_an_end_without_an_id(self):
        builder = AnswerBuilder(Reading(TINY, chat=False, stop=["It is"]), 1)
        first = [builder.push(Event(0, number, 0.0)) for number in ids("It i")]
        last = builder.push(Event(0, None, 0.0, "error"))
        assert ("".join(piece.text for piece in first), last.text) == ("", "It i")  # red when held text is lost
        assert (last.finish_reason, last.token_ids) == ("error", ())
        assert builder.completion().text == "It i"

    def test_what_comes_after_the_end_is_ignored(self):
        answer = run(ids("abc"), "stop", chat=False)
        assert answer.builder.push(Event(0, 5, 0.0)) == Piece()
        assert answer.builder.completion().token_ids == tuple(ids("abc"))

    def test_an_answer_that_is_not_finished(self):
        builder = AnswerBuilder(Reading(TINY, chat=False), 1)
        for number in ids("abc"):
            builder.push(Event(0, number, -1.0))
        assert (builder.completion().text, builder.completion().finish_reason) == ("abc", "length")
        assert not builder.finished

    def test_logprobs_only_when_asked_for(self):
        answer = run([5, 6, 7], chat=False)
        assert answer.completion.logprobs == (0.0, -0.5, -1.0)
        assert answer.builder.completion().logprobs is None


class TestStopIds:
    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize("chat", [False, True])
    def test_they_leave_no_text(self, end, chat):  # PF-52; red in a chat that skips the end of a message only
        answer = run([*ids("It is"), end], "stop", chat=chat, thinking=False)
        assert answer.text == answer.completion.text == "It is"
        assert answer.completion.token_ids[-1] == end

    @pytest.mark.parametrize("end", ENDS)
    def test_they_are_no_thoughts(self, end):
        answer = run([*ids("Two plus"), end], "stop")
        assert answer.reasoning == answer.completion.reasoning == "Two plus"
        assert answer.completion.usage.reasoning_tokens == len(ids("Two plus"))

    def test_they_are_text_when_they_end_nothing(self):
        answer = run([*ids("a"), ENDS[1], *ids("b")], chat=False, stop_ids=())
        assert answer.text == answer.completion.text == "a[EOS]b"

    def test_half_a_character_before_the_end(self):  # PF-54
        first, *_ = HAND
        answer = run([*ids("wave "), first, ENDS[0]], "stop", chat=False)
        assert answer.text == answer.completion.text == "wave \N{REPLACEMENT CHARACTER}"
        assert [piece.text for piece in answer.pieces[-2:]] == ["", "\N{REPLACEMENT CHARACTER}"]

    def test_no_piece_ends_inside_a_character(self):
        answer = run([*HAND, *HAND], chat=False)
        assert [piece.text for piece in answer.pieces] == (["", "", "", "👋"] * 2)


class TestStopStrings:
    def test_across_tokens_and_not_sent_in_part(self):  # PF-69
        numbers = [number for character in "say xyz now" for number in ids(character)]
        answer = run(numbers, chat=False, stop=["xyz"])
        assert answer.text == answer.completion.text == "say "
        assert answer.completion.finish_reason == "stop"
        assert len(answer.completion.token_ids) == 7  # nothing is drawn in vain, and what was drawn is told

    def test_held_text_is_released(self):
        numbers = [number for character in "say xy" for number in ids(character)]
        answer = run(numbers, chat=False, stop=["xyz"])
        assert [piece.text for piece in answer.pieces] == ["s", "a", "y", " ", "", "xy"]
        assert (answer.completion.text, answer.completion.finish_reason) == ("say xy", "length")

    def test_the_end_itself_completes_it(self):
        answer = run([*ids("wave "), HAND[0]], chat=False, stop=["\N{REPLACEMENT CHARACTER}"])
        assert (answer.text, answer.completion.text, answer.completion.finish_reason) == ("wave ", "wave ", "stop")

    @pytest.mark.parametrize("stop", ["think", "response", "tools", "call", "argument", "message", "index", 'type="n'])
    def test_tags_are_not_searched(self, stop):  # red when stop strings are looked for in the markup
        done = run(ids(THOUGHT + ANSWER + CALLS + DONE), "stop", stop=[stop]).completion
        assert (done.reasoning, done.text, done.finish_reason) == ("Two plus two.", "It is 4.", "tool_calls")
        assert json.loads(done.tool_calls[0].arguments) == {"city": "Oslo", "days": 2}

    def test_in_the_thoughts(self):
        answer = run(ids(THOUGHT + ANSWER + CALLS + DONE), "stop", stop=["plus"])
        done = answer.completion
        assert (answer.reasoning, answer.text, answer.calls) == ("Two ", "", [])
        assert (done.reasoning, done.text, done.tool_calls, done.finish_reason) == ("Two ", "", (), "stop")

    def test_in_the_answer(self):
        answer = run(ids(THOUGHT + ANSWER + CALLS + DONE), "stop", stop=["4", "never"])
        done = answer.completion
        assert (answer.reasoning, answer.text, answer.calls) == ("Two plus two.", "It is ", [])
        assert (done.reasoning, done.text, done.tool_calls, done.finish_reason) == (
            "Two plus two.",
            "It is ",
            (),
            "stop",
        )

    def test_not_across_channels(self):
        answer = run(ids("ab" + closed("think") + opened("response") + "cd" + DONE), "stop", stop=["bc"])
        assert (answer.reasoning, answer.text) == ("ab", "cd")


TEXTS = ["a", "Hello", " world", "\n", "", "xyz", "x", "yz", "你好", "é", "👋", '{"a": 1}', "think", "response"]
MARKUP = [
    *(
        opened(tag)
        for tag in ("think", "response", "tools", "call", 'call tool="f" index="1"', 'argument key="k" type="string"')
    ),
    *(closed(tag) for tag in ("think", "response", "tools", "call", "argument", "message")),
    THOUGHT,
    ANSWER,
    CALLS,
    OPEN,
    CLOSE,
    SEP,
    END,
]


@st.composite
def streams(draw) -> list[int]:
    """Texts, markup, ids of single bytes (cut characters among them) and any others, in any order."""
    parts = st.sampled_from(TEXTS) | st.sampled_from(MARKUP)
    numbers = []
    for part in draw(st.lists(parts.map(ids) | st.lists(st.integers(0, TINY.vocab_size - 1), max_size=3), max_size=12)):
        numbers += part
    return numbers or ids("a")


STOPS = st.lists(st.sampled_from(["xyz", "yzx", "lo", "\n", "think", "你", "a", ":", "Hello world", "<|"]), max_size=2)


class TestProperties:
    @settings(max_examples=200)
    @given(streams(), STOPS, st.booleans())
    def test_plain_text(self, numbers, stop, ignore):
        ends = () if ignore else ENDS
        answer = run(numbers, chat=False, stop=stop, stop_ids=ends)
        whole = TINY.decode([number for number in numbers if number not in ends])
        found = [(whole.find(text) + len(text), -len(text)) for text in stop if text in whole]
        expected = whole[: sum(min(found))] if found else whole
        assert answer.text == answer.completion.text == expected
        assert answer.completion.finish_reason == ("stop" if found else "length")
        used = answer.completion.token_ids
        assert list(used) == numbers[: len(used)] and (found or len(used) == len(numbers))
        assert tuple(number for piece in answer.pieces for number in piece.token_ids) == used

    @settings(max_examples=400)
    @given(streams(), STOPS, st.booleans(), st.booleans(), st.sampled_from(["stop", "length", "error"]))
    def test_chat(self, numbers, stop, thinking, tools, finish):
        answer = run(numbers, finish, stop=stop, thinking=thinking, tools=tools)
        done = answer.completion
        calls = [(call.name, call.arguments) for call in done.tool_calls]
        assert answer.calls == calls
        # a stream cannot take back blank text before calls, nor thoughts that turn out to be the answer
        assert answer.text == done.text or (calls and not answer.text.strip() and not done.text)
        assert answer.reasoning == (done.reasoning or "") or done.reasoning is None
        assert thinking or not answer.reasoning
        for text in (answer.text, answer.reasoning):
            assert not set(text) & set(SEALED.open + SEALED.close + SEALED.sep + SEALED.end)
            assert not any(string in text for string in stop)
        assert done.finish_reason == answer.pieces[-1].finish_reason
        if done.finish_reason == "tool_calls":
            assert calls and finish == "stop"
        assert (
            done.usage.completion_tokens == len(done.token_ids) == sum(len(piece.token_ids) for piece in answer.pieces)
        )
        assert 0 <= done.usage.reasoning_tokens <= len(done.token_ids)
        ends = [call.id for piece in answer.pieces for call in piece.tool_calls]
        assert len(set(ends)) == len(ends)
