"""Replies under a grammar: whatever it lets through is read back as what was asked for, and nothing good is kept out."""

import json
import re
import threading

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text.grammar import GrammarFailed, Grammars
from kimi_jax.text.grammar_schema import kinds
from kimi_jax.text.grammar_strings import FORMATS, containing
from kimi_jax.text.markup import CLOSE, END, SEALED
from kimi_jax.text.parse import parse
from kimi_jax.text.render import render
from kimi_jax.text.segments import closed, opened
from kimi_jax.text.stream import StreamParser
from tests.text.data import TINY
from tests.text.forms import LOOSE, record, tool
from tests.text.walk import allowed, feed, read, walk

SEEDS = range(4)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TINY)


WEATHER = tool(
    'get "weather" & more',  # a name that is escaped on the wire
    record(
        {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "_unit": {"enum": ["C", "F", None, 3]},
            "at": {"type": ["string", "null"], "format": "date"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        },
        "city",
        "_unit",
        **{"$defs": {"tag": {"type": "string", "minLength": 1, "maxLength": 3}}, "additionalProperties": False},
    ),
)
STRINGS = tool(
    "strings",
    record(
        {
            "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$|^x"},
            "length": {"type": "string", "minLength": 2, "maxLength": 5},
            "choice": {"anyOf": [{"const": 'say "hi"\n'}, {"enum": ["", "é你"]}]},
            "one": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
            "both": {"allOf": [{"pattern": "^[a-z]+$"}, {"$ref": "#/definitions/short"}], "type": "string"},
            **{name: {"type": "string", "format": name} for name in FORMATS},
        },
        *("pattern", "length", "choice", "one", "both", *FORMATS),
        definitions={"short": {"maxLength": 4}},
    ),
)
TREE = tool(
    "tree",
    {
        "$ref": "#/definitions/node",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "node": record(
                {"value/1": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}},
                *("value/1", "next"),
                additionalProperties=False,
            )
        },
    },
)
NAMES = tool(
    "names",  # of properties, as references must spell them
    record(
        {
            name: {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
            for name in ("c d", 'q"', "x/y~", "é", "1%2", "%25")
        },
        *("c d", 'q"', "x/y~", "é", "1%2", "%25"),
        **{"$defs": {"n": {"type": ["integer", "array"], "maxItems": 0}}},
    ),
)
ANYTHING = tool("anything", record({"a": True, "b": {}}, "a", "unlisted"))
STRICT = {each["function"]["name"]: each for each in (WEATHER, STRINGS, TREE, NAMES, ANYTHING, tool("nothing"))}

SCHEMAS = {
    "any object": {"type": "object"},
    "record": record({"name": {"type": "string"}, "n": {"type": "integer"}}, "name", additionalProperties=False),
    "list": {"type": "array", "items": {"enum": [1, "two", None, {"three": 3}]}, "minItems": 1},
    "reference": {"$ref": "#/$defs/a", "$defs": {"a": record({"b": {"type": "boolean"}}, "b")}},
    "text": {"type": "string", "pattern": "^[0-9]{3}$"},
}


def valid(value, schema):
    jsonschema.validate(
        value, schema, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker(["date"])
    )


def readings(ids, seed):
    """A reply as its parsers read it: whole, and by pieces, which are then put together."""
    text = read(ids)
    whole = parse(text, thinking=True, markup=SEALED)
    for by_pieces in (False, True):
        parser = StreamParser(thinking=True, argument_pieces=by_pieces, markup=SEALED)
        size = 1 + seed % 7
        deltas = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
        calls: dict[int, list[str]] = {}
        for call in (call for delta in deltas for call in delta.tool_calls):
            calls.setdefault(call.index, [call.name or ""])[0] += ""
            calls[call.index].append(call.arguments)
        streamed = [(name, "".join(pieces)) for name, *pieces in calls.values()]
        assert [name for name, _ in streamed] == [call.name for call in whole.tool_calls]
        assert [json.loads(text) for _, text in streamed] == [json.loads(call.arguments) for call in whole.tool_calls]
        if not calls:
            assert "".join(delta.content for delta in deltas) == (whole.content or "")
    return whole


class TestAnswers:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_a_walk_ends_in_json_that_follows_the_schema(self, grammars, name, seed):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
        reply = readings(walk(grammars.reply(thinking=True, response_format=wanted), seed), seed)
        valid(json.loads(reply.content), SCHEMAS[name])  # red with TEXT in the place of the answer
        assert reply.tool_calls == ()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_any_object(self, grammars, seed):
        grammar = grammars.reply(thinking=False, response_format={"type": "json_object"})
        reply = parse(read(walk(grammar, seed)), thinking=False, markup=SEALED)
        assert isinstance(json.loads(reply.content), dict)
        assert reply.reasoning is None

    def test_blanks_do_not_go_on_for_ever(self, grammars):
        grammar = grammars.reply(thinking=False, response_format={"type": "json_object"})
        assert feed(grammar, [TINY.ranks[b"{"], *[TINY.ranks[b" "]] * 400]) == 129  # red without `_SPACE`

    @pytest.mark.parametrize("seed", SEEDS)
    def test_who_may_call_answers_in_json_or_calls(self, grammars, seed):
        wanted = {"type": "json_object"}
        grammar = grammars.reply(thinking=True, tools=[WEATHER], tool_choice="auto", response_format=wanted)
        reply = readings(walk(grammar, seed), seed)
        assert reply.content or reply.tool_calls
        for text in (reply.content, *(call.arguments for call in reply.tool_calls)):
            assert text is None or isinstance(json.loads(text), dict)

    def test_calls_alone_are_a_reply_too(self, grammars):
        grammar = grammars.reply(thinking=False, tools=[LOOSE, WEATHER], response_format={"type": "json_object"})
        ids = TINY.encode('<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="run" index="1"<|sep|>', True)
        assert feed(grammar, ids) == len(ids)


class TestCalls:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("name", STRICT)
    def test_a_walk_ends_in_calls_that_follow_the_schema(self, grammars, name, seed):
        called = STRICT[name]
        reply = readings(walk(grammars.reply(thinking=True, tools=[called], tool_choice="required"), seed), seed)
        assert reply.tool_calls
        for call in reply.tool_calls:
            assert call.name == name
            valid(json.loads(call.arguments), called["function"]["parameters"] or {"maxProperties": 0})

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_named_tool_is_the_one_that_is_called(self, grammars, seed):
        named = {"type": "function", "function": {"name": "run"}}
        grammar = grammars.reply(thinking=True, tools=[WEATHER, LOOSE], tool_choice=named, parallel_tool_calls=False)
        (call,) = readings(walk(grammar, seed), seed).tool_calls  # red with `several` always
        assert call.name == "run"
        assert isinstance(json.loads(call.arguments), dict)

    def test_thoughts_and_content_before_calls_are_free(self, grammars):
        message = {"reasoning_content": "Hm <|close|>.", "content": "I look.", "tool_calls": [call_of("f", {})]}
        for choice in ("auto", "required"):
            assert takes(grammars.reply(thinking=True, tools=[tool(), LOOSE], tool_choice=choice), message)

    def test_auto_may_stay_without_calls_and_required_may_not(self, grammars):
        message = {"reasoning_content": "Hm.", "content": "No."}
        assert takes(grammars.reply(thinking=True, tools=[tool()]), message)
        assert not takes(grammars.reply(thinking=True, tools=[tool()], tool_choice="required"), message)

    def test_one_call_where_they_are_not_parallel(self, grammars):
        once, twice = ({"tool_calls": [call_of("run", {"a": 1})] * times} for times in (1, 2))
        for choice in ("auto", "required"):
            options = {"thinking": True, "tools": [LOOSE], "tool_choice": choice}
            assert takes(grammars.reply(**options, parallel_tool_calls=False), once)
            assert not takes(grammars.reply(**options, parallel_tool_calls=False), twice)
        assert takes(grammars.reply(**options), twice)

    @pytest.mark.parametrize(
        ("arguments", "fits"),
        [
            ({"city": "Oslo", "_unit": None}, True),
            ({"_unit": "C", "tags": ["a", "bcd"], "days": 14, "at": None, "city": ""}, True),
            ({"city": "Oslo"}, False),
            ({"city": "Oslo", "_unit": "K"}, False),
            ({"city": "Oslo", "_unit": 3, "days": 15}, False),
            ({"city": "Oslo", "_unit": 3, "tags": ["abcd"]}, False),
            ({"city": "Oslo", "_unit": 3, "at": "2026-13-01"}, False),
            ({"city": "Oslo", "_unit": 3, "at": "2026-12-01"}, True),
            ({"city": "Oslo", "_unit": 3, "at": "2000-02-29"}, True),
            ({"city": "Oslo", "_unit": 3, "at": "1900-02-29"}, False),
            ({"city": 5, "_unit": 3}, False),
            ({"city": "Oslo", "_unit": 3, "more": 1}, False),
        ],
    )
    def test_arguments_in_any_order(self, grammars, arguments, fits):
        grammar = grammars.reply(thinking=True, tools=[WEATHER], tool_choice="required")
        assert takes(grammar, {"tool_calls": [call_of(WEATHER["function"]["name"], arguments)]}) == fits

    def test_no_argument_comes_twice(self, grammars):
        grammar = grammars.reply(thinking=True, tools=[tool("f", record({"a": {}, "b": {}}))], tool_choice="required")
        text, *_ = rendered({"tool_calls": [call_of("f", {"a": 1, "b": 1})]}).rpartition("<|close|>call")
        assert feed(grammar, TINY.encode(text, True)) == len(TINY.encode(text, True))
        assert TINY.decode(allowed(grammar)) == CLOSE  # red without bit_clear

    def test_markup_has_the_tokens_of_the_renderer(self, grammars):
        grammar = grammars.reply(
            thinking=False, tools=[tool("_f=", record({"_id": {}}, "_id"))], tool_choice="required"
        )
        ids = TINY.encode_segments(
            [
                *(*closed("response"), *opened("tools"), *opened("call", tool="_f=", index=1)),
                *opened("argument", key="_id", type="null"),
            ]
        )
        for number in ids[: ids.index(TINY.ranks[b"1"])]:
            choices = allowed(grammar)
            assert number in choices
            assert len(choices) == 1 or number == ids[0]  # red when markup is text that may be cut at any place
            grammar.accept(number)

    def test_a_marker_that_is_only_spelled_is_text(self, grammars):
        arguments = {"city": "<|close|>argument<|sep|>", "_unit": 3}
        grammar = grammars.reply(thinking=True, tools=[WEATHER], tool_choice="required")
        assert takes(grammar, {"tool_calls": [call_of(WEATHER["function"]["name"], arguments)]})

    TYPES = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.text('ab<|>"&é\n ')),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
        max_leaves=5,
    )

    @settings(max_examples=40)
    @given(st.dictionaries(st.text('ab"&_é', min_size=1, max_size=5), TYPES, max_size=4), st.text("ab<|\né"))
    def test_what_the_renderer_writes_is_allowed(self, grammars, arguments, thoughts):
        properties = {key: {"type": kind} for key, value in arguments.items() for kind in kinds({"const": value}, {})}
        message = {"reasoning_content": thoughts, "tool_calls": [call_of("f", arguments), call_of("run", arguments)]}
        strict = tool("f", record(properties, *arguments, additionalProperties=False))
        assert takes(grammars.reply(thinking=True, tools=[strict, LOOSE], tool_choice="required"), message)

    def test_many_tools_work(self, grammars):
        tools = [tool(f"f{n}", record({f"p{m}": {"type": ["string", "null"]} for m in range(8)})) for n in range(64)]
        grammar = grammars.reply(thinking=True, tools=tools, tool_choice="required")
        assert takes(grammar, {"tool_calls": [call_of("f63", {"p7": "x", "p0": None})]})


def call_of(name, arguments):
    return {"function": {"name": name, "arguments": arguments}}


def rendered(message):
    segments = render([{"role": "assistant", **message}], effort=None, add_generation_prompt=False)
    return "".join(segment.text for segment in segments).partition("<|open|>think<|sep|>")[2]


def takes(grammar, message):
    """Whether the grammar lets an assistant's message through, token by token."""
    segments = render([{"role": "assistant", **message}], effort=None, add_generation_prompt=False)
    start = TINY.encode_segments([*opened("message", role="assistant"), *opened("think")])
    ids = TINY.encode_segments(segments)
    assert ids[: len(start)] == start
    return feed(grammar, ids[len(start) :]) == len(ids) - len(start) and grammar.finished


class TestObject:
    def test_what_is_not_asked_for_is_not_constrained(self, grammars):
        strict_false = {"type": "json_schema", "json_schema": {"strict": False, "schema": {"type": "wrong"}}}
        for asked in (
            {},
            {"response_format": {"type": "text"}},
            {"response_format": strict_false},
            {"tools": [LOOSE]},
            {"tools": [tool()], "tool_choice": "none"},
            {"parallel_tool_calls": False},
        ):
            assert grammars.reply(thinking=True, **asked) is None
        assert grammars.reply(thinking=True, tools=[tool()]) is not None

    def test_thoughts_hold_any_text_and_no_other_control_token(self, grammars):
        grammar = grammars.reply(thinking=True, response_format={"type": "json_object"})
        choices = set(allowed(grammar))
        whole = {number for token, number in TINY.ranks.items() if token.decode(errors="replace").encode() == token}
        assert whole <= choices
        assert {number for number in choices if TINY.is_special(number)} == {TINY.special_id(CLOSE)}

    def test_finished_with_the_end_token_alone(self, grammars):
        grammar = grammars.reply(thinking=False, response_format={"type": "json_object"})
        ids = TINY.encode("{}<|close|>response<|sep|><|close|>message<|sep|>", True)
        assert feed(grammar, ids) == len(ids)
        assert not grammar.finished
        assert TINY.decode(allowed(grammar)) == END
        grammar.accept(TINY.special_id(END))
        assert grammar.finished
        with pytest.raises(GrammarFailed, match="after the end"):
            grammar.accept(ids[0])

    def test_a_token_that_is_not_allowed(self, grammars):
        grammar = grammars.reply(thinking=False, response_format={"type": "json_object"})
        with pytest.raises(GrammarFailed, match="gave up"):
            grammar.accept(TINY.ranks[b"x"])
        with pytest.raises(GrammarFailed):  # it stays failed: a mask of zeros would draw anything
            grammar.mask()

    def test_replies_of_one_request_are_independent(self, grammars):
        first, second = (grammars.reply(thinking=False, response_format={"type": "json_object"}) for _ in range(2))
        first.accept(TINY.ranks[b"{"])
        assert TINY.ranks[b"{"] in allowed(second)  # red when the compiled grammar itself is handed out
        assert TINY.ranks[b"{"] not in allowed(first)

    def test_masks_are_not_shared(self, grammars):
        grammar = grammars.reply(thinking=False, response_format={"type": "json_object"})
        before = grammar.mask()
        grammar.accept(TINY.ranks[b"{"])
        assert not np.array_equal(before, grammar.mask())  # red when one buffer serves all masks

    def test_threads_may_ask_at_once(self, grammars):
        done: list[int] = []

        def ask(seed):
            schema = {"schema": record({f"p{seed}": {"type": "integer"}}, f"p{seed}")}
            grammar = grammars.reply(thinking=False, response_format={"type": "json_schema", "json_schema": schema})
            done.append(len(walk(grammar, seed)))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 4


@pytest.mark.parametrize(
    "pattern",  # ANCHOR is a $ that is no character; Python's own may stand before a last newline
    [
        *("a", "^a", "aANCHOR", "^aANCHOR", "^a|b", "a|^bANCHOR", r"a\$", r"a\\ANCHOR", "[$|]", "(a|b)cANCHOR"),
        *("", "^ANCHOR", r"[\]|]a", r"^\^", "x{2,3}ANCHOR"),
    ],
)
@given(text=st.text("abc$^|\\]x\n", max_size=5))
def test_a_pattern_may_be_found_anywhere(pattern, text):
    ours, python = (pattern.replace("ANCHOR", end) for end in ("$", r"\Z"))
    assert bool(re.fullmatch(containing(ours), text)) == bool(re.search(python, text))
