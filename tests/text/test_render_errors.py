"""Requests that cannot be rendered: a client error that names the place and what would work, never a crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.errors import ChatError
from kimi_jax.text.render import render

ASK = {"role": "user", "content": "x"}


def deep(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def cyclic() -> dict:
    value: dict = {}
    value["self"] = value
    return value


def turn(arguments: object, name: object = "f") -> dict:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        (None, "messages is None"),
        ("text", "messages is 'text'"),
        ({"role": "user"}, "messages is of type dict"),
        ([ASK, "x", 5], r"messages\[1\] is 'x'.*\n.*messages\[2\] is 5"),
        ([{}], r"messages\[0\] has role None; roles that work: system, developer, user, assistant, tool"),
        ([ASK, {"role": "function"}], r"messages\[1\] has role 'function'"),
        ([{"role": ["user"]}], r"messages\[0\] has role of type list"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content is of type dict"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content is of type bytes"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], r"content\[0\] is a part of type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"content\[0\] is a part of type 'text'"),
        ([{"role": "user", "name": 5, "content": ""}], r"messages\[0\]\.name is 5"),
        ([{"role": "assistant", "reasoning_content": 5}], r"messages\[0\]\.reasoning_content is 5"),
        ([{"role": "assistant", "reasoning": {"a": 1}}], r"messages\[0\]\.reasoning is of type dict"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\]\.tool_calls is 'f'"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls is of type dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] has no function object"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], r"tool_calls\[0\] has no function object"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "tool_calls works"),
        ([turn({}, name="")], r"tool_calls\[0\]\.function\.name is ''"),
        ([turn({}, name=["f"])], r"tool_calls\[0\]\.function\.name is of type list"),
        ([turn("[1]")], r"function\.arguments is JSON of type array; an object works"),
        ([turn('"x"')], r"function\.arguments is JSON of type string"),
        ([turn(5)], r"function\.arguments is JSON of type number"),
        ([turn([])], r"function\.arguments is JSON of type array"),
        ([turn({5: 1})], "the key 5 is not a string"),
        ([turn({"a": {1, 2}})], "a value of type set is not JSON"),
        ([turn({"a": b"x"})], "a value of type bytes is not JSON"),
        ([turn(deep(300))], "nested deeper than 200 levels"),
        ([turn(cyclic())], "nested deeper than 200 levels"),
        ([turn({"a": 10**5000})], "too large"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\] is a tool result that no call can be found for"),
        ([{"role": "tool", "tool_call_id": ["x"], "content": "x"}], "tool_call_id is of type list"),
        ([{"role": "system", "tools": "f"}], r"messages\[0\]\.tools is 'f'"),
        ([{"role": "system", "tools": [5]}], r"messages\[0\]\.tools\[0\] is 5"),
        ([ASK, {"role": "user", "content": "a\ud800"}], r"messages\[1\]: half a surrogate pair, U\+D800"),
        ([{"role": "user", "name": "\udfff", "content": ""}], r"messages\[0\]: half a surrogate pair"),
        ([turn({"\ud800": 1})], r"messages\[0\]: half a surrogate pair"),
        ([turn('{"a": "\ud800"}')], r"messages\[0\]: half a surrogate pair"),
    ],
)
def test_a_bad_message_is_named(messages, said):
    with pytest.raises(ChatError, match=said):
        render(messages)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"effort": "medium"}, "effort is 'medium'; values that work: low, high, max"),
        ({"effort": ["max"]}, "effort is of type list"),
        ({"tools": "f"}, "tools is 'f'"),
        ({"tools": {"a": 1}}, "tools is of type dict"),
        ({"tools": ["f", 5]}, r"(?s)tools\[0\] is 'f'.*tools\[1\] is 5"),
        ({"tools": [deep(300)]}, "tools: nested deeper than 200"),
        ({"tools": [cyclic()]}, "tools: nested deeper than 200"),
        ({"tools": [{"a": object()}]}, "tools: a value of type object is not JSON"),
        ({"tools": [{1: 2}]}, "tools: the key 1"),
        ({"tools": [{"a": "\ud800"}]}, "tools: half a surrogate pair"),
        ({"tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
        ({"tool_choice": 5}, "tool_choice is 5"),
        ({"tool_choice": ["none"]}, "tool_choice is of type list"),
        ({"response_format": "json"}, "response_format has type 'json'"),
        ({"response_format": {}}, "response_format has type of type dict"),
        ({"response_format": {"type": "xml"}}, "response_format has type 'xml'"),
        ({"response_format": {"type": ["x"]}}, "response_format has type of type list"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": deep(300)}}}, "nested deeper"),
        ({"image_prompts": ["x"]}, "0 image parts for 1 images"),
    ],
)
def test_a_bad_option_is_named(options, said):
    with pytest.raises(ChatError, match=said):
        render([ASK], **options)


def test_more_image_parts_than_images():
    with pytest.raises(ChatError, match="2 image parts for 1 images"):
        render([{"role": "user", "content": [{"type": "image"}, {"type": "image_url"}]}], image_prompts=["x"])


def test_every_problem_is_named_at_once():
    messages = [{"role": "x"}, ASK, {"role": "user", "content": 5}, {"role": "tool"}]
    with pytest.raises(ChatError) as caught:
        render(messages, effort="huge", tool_choice="y", image_prompts=["one"])
    # Red when the first problem is raised at once. Images are not counted: refused messages have not asked for theirs.
    assert len(caught.value.problems) == 5


def test_effort_is_not_looked_at_without_thinking():
    assert render([ASK], thinking=False, effort="huge") == render([ASK], thinking=False)


def test_a_long_value_is_not_repeated_in_the_error():
    with pytest.raises(ChatError) as caught:
        render([{"role": "x" * 1_000_000}])
    assert len(str(caught.value)) < 500


def test_a_huge_message_is_rendered():
    text = "word " * 1_000_000
    assert any(segment.text == text for segment in render([{"role": "user", "content": text}]))


KEYS = "role content name tool_calls function arguments type text tools id tool_call_id reasoning json_schema schema"
WORDS = "user assistant tool function text image json_schema required"
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.sampled_from(WORDS.split())
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(KEYS.split()), st.text(max_size=2), st.integers()), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


@given(st.lists(ANYTHING, max_size=3) | ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_anything_renders_or_is_a_chat_error(messages, tools, effort, tool_choice, response_format):
    try:
        found = render(messages, tools=tools, effort=effort, tool_choice=tool_choice, response_format=response_format)
    except ChatError as error:
        assert error.problems
    else:
        "".join(segment.text for segment in found).encode()
