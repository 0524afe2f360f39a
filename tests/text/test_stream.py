import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text.calls import call_arguments
from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED, SPELLED
from kimi_jax.text.parse import parse, skipped_thoughts
from kimi_jax.text.stream import Delta, StreamParser
from tests.text.data import ANSWER, CALLS, CHANNELS, CUTS, SOUP, THINK, TINY, cases, cut, parse_options, same_arguments

GOLDEN = cases("parse.json")
STREAMS = cases("parse_stream.json")
SAME = sorted(name for name, case in GOLDEN.items() if case["streaming"] == "same")


def stream(chunks, **more):
    """Reasoning, content and [name, arguments] of all deltas put together, as a client does it."""
    parser = StreamParser(**more)
    reasoning, content, calls, ids = "", "", [], []
    for delta in [*map(parser.push, chunks), parser.finish()]:
        reasoning += delta.reasoning
        content += delta.content
        for news in delta.tool_calls:
            if news.index == len(calls):
                assert news.id
                assert news.name
                calls.append([news.name, ""])
                ids.append(news.id)
            else:
                assert news.index == len(calls) - 1
                assert news.id is None
                assert news.name is None
            calls[news.index][1] += news.arguments
    assert len(set(ids)) == len(ids)
    return reasoning, content, calls


def whole(text, **more):
    reply = parse(text, **more)
    return reply.reasoning or "", reply.content or "", [[call.name, call.arguments] for call in reply.tool_calls]


def check(found, case):
    expected = case["expected"]
    reasoning, content, calls = found
    assert (reasoning or None, content or None) == (expected["reasoning"], expected["content"])
    assert [name for name, _ in calls] == [call["name"] for call in expected["tool_calls"]]
    for (_, got), wanted in zip(calls, expected["tool_calls"], strict=True):
        assert same_arguments(got, wanted["arguments"], case.get("arguments_compare", "json"))


@pytest.mark.parametrize("name", SAME)
def test_golden_by_characters_and_in_two(name):
    case = GOLDEN[name]
    text = case["text"]
    check(stream(list(text), **parse_options(case)), case)
    for place in range(len(text) + 1):  # red when a marker that a cut splits is not held back
        check(stream([text[:place], text[place:]], **parse_options(case)), case)


@pytest.mark.parametrize("name", SAME)
@given(places=CUTS)
def test_golden_in_any_pieces(name, places):
    case = GOLDEN[name]
    check(stream(cut(case["text"], places), **parse_options(case)), case)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("name", SAME)
def test_golden_in_equal_pieces(name, size):
    text = GOLDEN[name]["text"]
    check(
        stream([text[at : at + size] for at in range(0, len(text), size)], **parse_options(GOLDEN[name])), GOLDEN[name]
    )


@pytest.mark.parametrize("name", SAME)
def test_golden_by_tokens(name):
    case = GOLDEN[name]
    decoder = Detokenizer(TINY, markup=SEALED)
    chunks = [decoder.push(number) for number in TINY.encode(case["text"], markers=True)] + [decoder.flush()]
    check(stream(chunks, markup=SEALED, **parse_options(case)), case)


def test_the_cases_that_may_differ_are_known():
    assert sorted(GOLDEN.keys() - SAME) == ["skipped_think", "whitespace_content_with_call"]


@pytest.mark.parametrize(("text", "thinking", "expected"), CHANNELS)
def test_channels_by_characters_and_in_two(text, thinking, expected):
    for place in range(len(text) + 1):
        for chunks in ([text[:place], text[place:]], [*text[:place], text[place:]], [text[:place], *text[place:]]):
            reasoning, content, _ = stream(chunks, thinking=thinking)
            if expected[0] is not None or "Hi" not in reasoning:  # skipped thoughts have been sent
                assert (reasoning or None) == expected[0]
            assert (content or None) == expected[1]


@given(CUTS)
def test_skipped_thoughts_are_sent_again_as_content(places):
    case = GOLDEN["skipped_think"]
    reasoning, content, calls = stream(cut(case["text"], places))
    assert content == case["expected"]["content"]
    assert content.startswith(reasoning)
    assert calls == []


@given(CUTS)
def test_blank_content_before_a_call_may_be_sent(places):
    case = GOLDEN["whitespace_content_with_call"]
    reasoning, content, calls = stream(cut(case["text"], places))
    assert (reasoning, calls) == ("t", [["f", "{}"]])
    assert content in ("", "\n")


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_golden_chunks(name):
    case = STREAMS[name]
    check(stream(case["chunks"], **parse_options(GOLDEN[case["case"]])), case)


def agree(found, expected, text):
    """Equal, but for the two things that a stream cannot take back."""
    if found[0] != expected[0]:
        body = text.partition(SPELLED.end)[0].removeprefix(SPELLED.think_open)
        assert skipped_thoughts(body, SPELLED)
        assert expected[0] == ""
        assert body.startswith(found[0])
    if found[1] != expected[1]:
        assert expected[2]
        assert (found[1].strip(), expected[1]) == ("", "")
    assert found[2] == expected[2]


@settings(max_examples=300)
@given(SOUP, CUTS, st.booleans(), st.booleans())
def test_a_stream_equals_the_whole(text, places, thinking, tools):
    expected = whole(text, thinking=thinking, tools=tools)
    for chunks in (cut(text, places), list(text), [text]):
        agree(stream(chunks, thinking=thinking, tools=tools), expected, text)


@given(SOUP, CUTS, st.booleans())
def test_the_end_token_ends_the_reply(text, places, thinking):
    ended = text + SPELLED.end + SPELLED.tools_open + "more"
    agree(stream(cut(ended, places), thinking=thinking), whole(text, thinking=thinking), ended)


@given(st.text("a<|openclsthikr>/ \n", max_size=40), CUTS)
def test_no_marker_is_ever_sent(text, places):
    """Everything is decided as late as it must be: what was sent is a beginning of the final text."""
    reply = f"{text}<|close|>think<|sep|><|open|>response<|sep|>{text}<|close|>response<|sep|>"
    parser = StreamParser()
    reasoning = content = ""
    for chunk in cut(reply, places):
        delta = parser.push(chunk)
        reasoning += delta.reasoning
        content += delta.content
        assert text.startswith(reasoning)
        assert text.startswith(content)
    assert (reasoning, content) == (text, text)  # red when anything is held longer than it must be
    assert parser.finish() == Delta()


def test_text_is_sent_as_soon_as_it_is_no_marker():
    parser = StreamParser()
    sent = [parser.push(chunk).reasoning for chunk in ("a <", "| b", "<|open", "|>resp", "x")]
    assert sent == ["a ", "<| b", "", "", "<|open|>respx"]
    assert not parser.push("<|close|>")
    assert parser.finish() == Delta()
    assert parser.push("more") == Delta()


# Tool calls in pieces.

KEYS, STRINGS = st.text('k"&é\\', max_size=3), st.text('s<|"\\\n\t\x00é👍&', max_size=12)
OTHERS = st.sampled_from(
    [("number", "1"), ("object", '{"x": [1, "y"]}'), ("boolean", "True"), ("null", "null"), ("array", "[")]
)
ELEMENT = st.one_of(
    st.builds(lambda key, value: (key, "string", value), KEYS, STRINGS),
    st.builds(lambda key, pair: (key, *pair), KEYS, OTHERS),
)


def element(key, kind, value):
    key = key.replace("&", "&amp;").replace('"', "&quot;")
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


ARGUMENTS = st.lists(ELEMENT, max_size=4).map(lambda found: "".join(element(*one) for one in found))
BLOCK = st.sampled_from(['{"a": 1}', "{", "[1]", ""]).map(lambda raw: f"<|open|>json<|sep|>{raw}<|close|>json<|sep|>")
OPEN_BLOCK = st.just("<|open|>json<|sep|>{")
CALL_BODY = st.one_of(
    ARGUMENTS,
    BLOCK,
    st.tuples(ARGUMENTS, BLOCK).map("".join),
    st.tuples(BLOCK, ARGUMENTS).map("".join),
    st.tuples(OPEN_BLOCK, ARGUMENTS).map("".join),
)


@given(st.lists(CALL_BODY, min_size=1, max_size=3), CUTS)
def test_argument_pieces_add_up_to_the_arguments(bodies, places):
    calls = "".join(f'<|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|>' for body in bodies)
    text = f"{THINK}{ANSWER}{CALLS}{calls}<|close|>tools<|sep|><|close|>message<|sep|>"
    expected = [call_arguments(body, SPELLED) for body in bodies]
    for chunks in (cut(text, places), list(text)):
        reasoning, content, found = stream(chunks, argument_pieces=True)
        assert (reasoning, content) == ("t", "r")
        assert [name for name, _ in found] == ["f"] * len(bodies)
        for (_, got), wanted in zip(found, expected, strict=True):
            assert got == wanted or list(json.loads(got).items()) == list(json.loads(wanted).items())  # repeated keys


# A repeated key is sent twice; a call that is cut off is sent in part.
IN_PIECES = [name for name in SAME if name not in ("duplicate_key", "trunc_in_argument", "trunc_second_call")]


@pytest.mark.parametrize("name", IN_PIECES)
def test_golden_with_argument_pieces(name):
    case = GOLDEN[name]
    for place in range(len(case["text"]) + 1):
        check(stream([case["text"][:place], case["text"][place:]], argument_pieces=True, **parse_options(case)), case)


def test_a_call_opens_once_and_its_string_comes_as_it_is_written():
    parser = StreamParser(argument_pieces=True)
    parser.push(THINK + ANSWER + CALLS)
    (opened,) = parser.push('<|open|>call tool="f" index="1"<|sep|>').tool_calls
    assert (opened.index, opened.name, opened.arguments) == (0, "f", "")
    assert opened.id
    chunks = [
        '<|open|>argument key="a" type="string"<|sep|>',
        'x"',
        "<|close|>",
        "y",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ]
    pieces = ["".join(news.arguments for news in parser.push(chunk).tool_calls) for chunk in chunks]
    assert pieces == ['{"a": "', 'x\\"', "", "<|close|>y", '"', "}"]


def test_a_call_that_is_cut_off_has_been_sent_in_part():
    text = f'{THINK}{ANSWER}{CALLS}<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>x'
    assert stream([text]) == ("t", "r", [])
    assert stream([text], argument_pieces=True) == (
        "t",
        "r",
        [["f", '{"a": "x']],
    )  # not closed: it must not look complete


def test_a_long_argument_takes_linear_time():
    parser = StreamParser()
    parser.push(f'{THINK}{CALLS}<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>')
    start = time.process_time()
    for _ in range(100_000):
        parser.push("word ")
    assert time.process_time() - start < 6  # 1 s; red (14 s) when all that is held is searched or copied at each step
    (call,) = parser.push("<|close|>argument<|sep|><|close|>call<|sep|>").tool_calls
    assert len(call.arguments) == 500_000 + len('{"a": ""}')


@given(SOUP, CUTS, st.booleans())
def test_argument_pieces_never_fail(text, places, thinking):
    text = f'{CALLS}<|open|>call tool="f"<|sep|>{text}'
    stream(cut(text, places), thinking=thinking, argument_pieces=True)


def test_dropped_calls_are_not_sent_in_pieces():
    text = GOLDEN["one_call"]["text"]
    assert stream(list(text), tools=False, argument_pieces=True)[2] == []
