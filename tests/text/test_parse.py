import json
import time
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text import jsontext
from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED, SPELLED, attributes, escape
from kimi_jax.text.parse import parse
from kimi_jax.text.render import render
from kimi_jax.text.segments import Segment
from kimi_jax.text.usage import count_reasoning_tokens
from tests.text.data import ANSWER, CALLS, CHANNELS, SOUP, THINK, TINY, cases, parse_options, same_arguments

GOLDEN = cases("parse.json")


def check(reply, case):
    expected = case["expected"]
    assert (reply.reasoning, reply.content) == (expected["reasoning"], expected["content"])
    assert [call.name for call in reply.tool_calls] == [call["name"] for call in expected["tool_calls"]]
    for got, wanted in zip(reply.tool_calls, expected["tool_calls"], strict=True):
        assert same_arguments(got.arguments, wanted["arguments"], case["arguments_compare"])


def sealed_text(ids):
    decoder = Detokenizer(TINY, markup=SEALED)
    return "".join(map(decoder.push, ids)) + decoder.flush()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden(name):
    case = GOLDEN[name]
    check(parse(case["text"], **parse_options(case)), case)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_from_ids(name):
    case = GOLDEN[name]
    ids = TINY.encode(case["text"], markers=True)
    check(parse(sealed_text(ids), markup=SEALED, **parse_options(case)), case)


def arguments(body):
    """The arguments text of a call with the given inside."""
    text = f'{THINK}{ANSWER}{CALLS}<|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|>'
    (call,) = parse(text).tool_calls
    return call.arguments


def argument(kind, value, key="a"):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (argument("number", "NaN"), '{"a": "NaN"}'),  # red with Python's own reading of constants
        (argument("number", "-Infinity"), '{"a": "-Infinity"}'),
        (argument("number", "1e400"), '{"a": 1e400}'),  # red through a float: inf
        (argument("number", "9" * 5000), f'{{"a": {"9" * 5000}}}'),  # red through an int: too many digits
        (argument("number", "0.10"), '{"a": 0.10}'),
        (argument("number", " 5\n"), '{"a": 5}'),
        (argument("number", "5 6"), '{"a": "5 6"}'),
        (argument("object", '{"b":[1,{"c":null}]}'), '{"a": {"b": [1, {"c": null}]}}'),
        (argument("object", "[" * 500 + "]" * 500), f'{{"a": "{"[" * 500 + "]" * 500}"}}'),  # red without a limit
        (argument("object", "[" * 100_000), f'{{"a": "{"[" * 100_000}"}}'),
        (argument("array", '["' + "[" * 500 + '"]'), f'{{"a": ["{"[" * 500}"]}}'),  # brackets in a string are no depth
        (argument("object", '"\\ud800"'), '{"a": "\\ud800"}'),
        (argument("string", "\ud800"), '{"a": "\\ud800"}'),
        (argument("string", " x \n"), '{"a": " x \\n"}'),
        (argument("string", "&quot;"), '{"a": "&quot;"}'),
        (argument("number", "5", key="") + argument("string", "x", key="&quot;"), '{"": 5, "\\"": "x"}'),
        ("<|open|>argument<|sep|>5<|close|>argument<|sep|>", '{"": "5"}'),
        (argument("number", "1") + argument("number", "2", "b") + argument("string", "3"), '{"a": "3", "b": 2}'),
        ('<|open|>json type="object"<|sep|>{"a":1}<|close|>json<|sep|>', '{"a": 1}'),
        ('<|open|>json type="object"<|sep|> {"a":<|close|>json<|sep|>', ' {"a":'),
        ('<|open|>json type="object"<|sep|>[1]<|close|>json<|sep|>', "[1]"),
        ("<|open|>json<|sep|>{}<|close|>json<|sep|>" + argument("number", "1"), "{}"),
        (argument("number", "1") + "<|open|>json<|sep|>{}<|close|>json<|sep|>", '{"a": 1}'),
        ("<|open|>json<|sep|>{" + argument("number", "1"), '{"a": 1}'),
        ('<|open|>argument key="a"<|sep|>never closed', "{}"),
        ("<|open|>arguments<|sep|>x<|close|>argument<|sep|>stray", "{}"),
    ],
)
def test_arguments(body, expected):
    assert arguments(body) == expected


@pytest.mark.parametrize(("text", "thinking", "expected"), CHANNELS)
def test_channels(text, thinking, expected):
    reply = parse(text, thinking=thinking)
    assert (reply.reasoning, reply.content) == expected


@pytest.mark.parametrize("cut", SPELLED.cut_markers)
def test_no_part_of_a_marker_is_shown_where_generation_stopped(cut):
    assert parse(f"a{cut}").reasoning == "a"
    assert parse(f"a{cut}", thinking=False).content == "a"
    assert parse(f"{THINK}<|open|>response<|sep|>b{cut}").content == "b"


def test_blank_content_stays_when_calls_are_dropped():
    call = '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'
    text = f"{THINK}<|open|>response<|sep|>\n<|close|>response<|sep|>{CALLS}{call}"
    assert parse(text).content is None
    assert parse(text, tools=False).content == "\n"
    assert parse(text, tools=False).tool_calls == ()


def test_ids_of_calls_are_unique_and_can_be_chosen():
    call = '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'
    text = THINK + ANSWER + CALLS + call * 3
    assert len({call.id for call in parse(text).tool_calls}) == 3
    numbers = map(str, count())
    assert [call.id for call in parse(text, new_id=lambda: next(numbers)).tool_calls] == ["0", "1", "2"]


def test_only_real_tokens_are_markers_in_sealed_text():
    value = "if text.endswith('<|close|>argument<|sep|>'): <|end_of_msg|> \ufdd0"
    turn = {"tool_calls": [{"function": {"name": "write", "arguments": {"code": value}}}]}
    segments = render([{"role": "assistant", **turn}], effort=None, add_generation_prompt=False)
    inside_thoughts = segments[segments.index(Segment("think", False)) + 2 :]
    reply = parse(sealed_text(TINY.encode_segments(inside_thoughts)), markup=SEALED)
    # Red with SPELLED, where the value ends at the spelled marker.
    assert json.loads(reply.tool_calls[0].arguments) == {"code": value.replace("\ufdd0", "\ufffd")}


FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FINITE, st.text('a<|"\\é你 \n')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"&<', max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.text('a<|"&é\n '),
    st.text("b |>\n", min_size=1),
    st.text('f"&', min_size=1),
    st.dictionaries(st.text('ab"&;quot'), VALUES),
)
def test_what_the_renderer_writes_is_read_back(thoughts, content, name, given):
    turn = {"tool_calls": [{"function": {"name": name, "arguments": given}}]}
    message = {"role": "assistant", "reasoning_content": thoughts, "content": content, **turn}
    segments = render([message], effort=None, add_generation_prompt=False)
    text = "".join(segment.text for segment in segments).partition("<|open|>think<|sep|>")[2]
    reply = parse(text)
    assert reply.reasoning == (thoughts if thoughts.strip() else None)
    assert reply.content == (content if content.strip() else None)
    assert [call.name for call in reply.tool_calls] == [name]
    assert list(json.loads(reply.tool_calls[0].arguments).items()) == list(given.items())


@given(st.text('&quot;am"<>'))
def test_escaped_attributes_come_back(value):
    # Red when & is not escaped first, or unescaped first.
    assert attributes(f' key="{escape(value)}"') == {"key": value}


@given(SOUP, st.booleans(), st.booleans())
def test_anything_can_be_parsed(text, thinking, tools):
    reply = parse(text, thinking=thinking, tools=tools)
    for call in reply.tool_calls:
        assert call.name
        assert isinstance(call.arguments, str)
    assert reply.reasoning != ""
    assert reply.content != ""


@pytest.mark.parametrize(
    "unit", [*SPELLED.markers, "<|open|>call<|sep|>", "<|open|>call", "<|open|>argument<|sep|>", '"', "["]
)
def test_hostile_repetition_is_parsed_in_time(unit):
    inside = f'{THINK}{CALLS}<|open|>call tool="f"<|sep|>{unit * 50_000}<|close|>call<|sep|>'
    start = time.process_time()
    for text in (unit * 50_000, inside):
        parse(text)
    assert time.process_time() - start < 8  # 0.3 s; red (30 s) when an unclosed element is searched for again and again


@given(VALUES)
def test_json_text_keeps_its_value(value):
    assert json.loads(jsontext.write(jsontext.read(json.dumps(value)))) == value


def test_reasoning_tokens():
    def tokens(text, **more):
        return count_reasoning_tokens(TINY.encode(text, markers=True), TINY, **more)

    alone = len(TINY.encode("Some 想 thoughts."))
    rest = "<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert tokens("Some 想 thoughts." + rest) == alone  # red when markers are counted
    assert tokens("<|open|>think<|sep|>Some 想 thoughts." + rest) == alone
    assert tokens("Some 想 thoughts.<|close|>") == alone
    assert tokens("Some 想 thoughts.") == alone
    assert tokens("Hi<|close|>response<|sep|>") == 0
    assert tokens("Hi" + rest, thinking=False) == 0
    assert tokens("") == 0
