import copy

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_jax.text.errors import ChatError
from kimi_jax.text.markup import IMAGE_SLOT, image_prompt
from kimi_jax.text.render import render
from kimi_jax.text.segments import Segment
from tests.text.data import TINY, UNICODE, cases, golden_prompt

GOLDEN = cases("render.json")
# The released renderer lets text claim an image place and drops unknown roles; we do neither (chat-format 5.2 and 6).
OURS_DIFFER = {"image_placeholder_in_text", "developer_dropped"}
NAMES = sorted([*TINY.special_ids, IMAGE_SLOT])


def prompt(messages, **options):
    return "".join(segment.text for segment in render(messages, **options))


def bare(messages, **options):
    """The prompt without effort message and generation prompt."""
    return prompt(messages, effort=None, add_generation_prompt=False, **options)


@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - OURS_DIFFER))
def test_golden(name):
    case = copy.deepcopy(GOLDEN[name])
    if case["expected"].get("error"):
        with pytest.raises(ChatError):
            golden_prompt(case)
    else:
        found = golden_prompt(case)
        assert "".join(segment.text for segment in found) == case["expected"]["text"]
        assert [list(segment) for segment in found] == case["expected"]["segments"]
        ids = TINY.encode_segments(found)
        assert ids == case["expected"]["tiny_ids"]  # red when the joined text is encoded: two cases differ
        single_pass = TINY.encode(case["expected"]["text"], markers=True)
        assert (single_pass != ids) == case["expected"]["single_pass_would_differ"]
    assert case == GOLDEN[name]  # red when a result is reordered or named in place


def test_text_cannot_claim_an_image():
    case = GOLDEN["image_placeholder_in_text"]
    with pytest.raises(ChatError, match="0 image parts for 1 images"):
        golden_prompt(case)
    messages = [{"role": "user", "content": [{"type": "text", "text": IMAGE_SLOT}, {"type": "image_url"}]}]
    found = render(messages, image_prompts=[image_prompt(28, 28)])
    assert Segment(IMAGE_SLOT, False) in found  # red when text is searched for the placeholder
    assert Segment(image_prompt(28, 28), True) in found


def test_developer_is_system():
    case = copy.deepcopy(GOLDEN["developer_dropped"])
    found = golden_prompt(case)
    case["messages"][0]["role"] = "system"
    assert found == golden_prompt(case)
    assert any(segment.text == "rules" for segment in found)  # red when the role is dropped


def test_results_accept_name_and_position_as_id(golden):
    case = golden("request_mapping.json")["tool_result_alias"]
    text = bare(case["messages"], thinking=False)
    places = [text.index(f'tool="{tool}" index="{n}"<|sep|>{body}') for tool, n, body in case["expected_tool_order"]]
    assert places == sorted(places)


def call(name, given, number="c"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": given}}


def assistant(*calls, **more):
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(given, content, **more):
    return {"role": "tool", "tool_call_id": given, "content": content, **more}


def results(*messages):
    """(tool, index, body) of the tool messages of a prompt."""
    parts = bare(messages, thinking=False).split('message role="tool"')[1:]
    return [part.split("<|close|>")[0].removeprefix(" tool=") for part in parts]


def test_results_of_two_turns_are_counted_apart():
    first, second = assistant(call("f", {}, "1")), assistant(call("g", {}, "2"))
    found = results(first, result("1", "a"), second, result("2", "b"))
    assert found == ['"f" index="1"<|sep|>a', '"g" index="1"<|sep|>b']  # red when the count goes on


def test_results_are_counted_across_other_messages():
    turn = assistant(call("f", {}, "1"), call("g", {}, "2"))
    found = results(turn, result("2", "b"), {"role": "user", "content": "?"}, result("1", "a"))
    assert found == ['"g" index="1"<|sep|>b', '"f" index="2"<|sep|>a']


def test_the_first_of_two_calls_with_one_id_counts():
    turn = assistant(call("f", {}, "x"), call("g", {}, "x"), call("h", {}, "y"))
    found = results(turn, result("y", "3"), result("x", "1"), result("x", "2"))
    assert found == ['"f" index="1"<|sep|>1', '"f" index="2"<|sep|>2', '"h" index="3"<|sep|>3']


def test_an_id_wins_over_an_alias():
    turn = assistant(call("f", {}, "g:1"), call("g", {}, "other"))
    assert results(turn, result("g:1", "a")) == ['"f" index="1"<|sep|>a']


def test_a_result_may_name_its_own_tool():
    assert results(result("none", "a", name="f")) == ['"f" index="1"<|sep|>a']
    assert results(result("none", "a", name="f", tool="g")) == ['"g" index="1"<|sep|>a']


@pytest.mark.parametrize("schema", [{"schema": {"b": 1, "a": 2}}, {"json_schema": {"b": 1, "a": 2}}, {"b": 1, "a": 2}])
def test_the_three_places_of_a_schema(schema):
    text = prompt([{"role": "user", "content": "x"}], response_format={"type": "json_schema", "json_schema": schema})
    assert '```json\n{"a":2,"b":1}\n```<|close|>' in text


def test_no_message_for_plain_text_and_for_a_choice_without_tools():
    plain = [{"role": "user", "content": "x"}]
    assert render(plain, response_format={"type": "text"}) == render(plain)
    assert render(plain, tool_choice="required") == render(plain)
    assert "MUST NOT" in prompt(plain, tool_choice="none", tools=[{"type": "function"}])


def test_keys_of_declarations_are_sorted_by_code_point_in_lists_too():
    text = prompt([{"role": "user", "content": "x"}], tools=[{"b": [{"é": 1, "z": 2, "Z": 3}], "a": []}])
    assert '[{"a":[],"b":[{"Z":3,"z":2,"é":1}]}]' in text


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        ('{"a": NaN}', '<|open|>argument key="a" type="number"<|sep|>NaN<|close|>argument<|sep|>'),
        ('{"a": 1.50}', '<|open|>argument key="a" type="number"<|sep|>1.5<|close|>argument<|sep|>'),
        ('{"": ""}', '<|open|>argument key="" type="string"<|sep|><|close|>argument<|sep|>'),
        ("{", '<|open|>json type="object"<|sep|>{<|close|>json<|sep|>'),
        ('{"a": "\\ud800"}', '<|open|>json type="object"<|sep|>{"a": "\\ud800"}<|close|>json<|sep|>'),
        ("9" * 5000, f'<|open|>json type="object"<|sep|>{"9" * 5000}<|close|>json<|sep|>'),
        ('{"a":' + "[" * 5000, f'<|open|>json type="object"<|sep|>{{"a":{"[" * 5000}<|close|>json<|sep|>'),
        ("[" * 300 + "]" * 300, f'<|open|>json type="object"<|sep|>{"[" * 300 + "]" * 300}<|close|>json<|sep|>'),
    ],
)
def test_arguments_that_a_model_may_have_written(given, inside):
    text = bare([assistant(call("f", given))], thinking=False)
    assert text.split('index="1"<|sep|>')[1].startswith(inside + "<|close|>call")


TEXT = st.lists(st.one_of(st.sampled_from(NAMES), UNICODE)).map("".join)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)
CONTENT = st.one_of(TEXT, st.none(), st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3))
NAME = TEXT.filter(bool)
CALL = st.builds(call, NAME, st.dictionaries(TEXT, JSON, max_size=3))
ROLE = st.sampled_from(["user", "system", "developer"])
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": CONTENT, "name": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENT, "reasoning": TEXT, "tool_calls": st.lists(CALL, max_size=2)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": CONTENT, "name": NAME}),
)


@given(
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2),
    st.booleans(),
)
def test_only_the_renderer_writes_control_tokens(messages, tools, thinking):
    before = copy.deepcopy((messages, tools))
    found = render(messages, tools=tools, thinking=thinking)
    marked = {segment.text for segment in found if segment.markers}
    assert marked <= {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}  # red when any body is marked
    ids = TINY.encode_segments(found)
    assert sum(number >= 564 for number in ids) == sum(segment.markers for segment in found)
    assert repr((messages, tools)) == repr(before)
    assert TINY.decode(ids) == "".join(segment.text for segment in found)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 500))
@example(1861, 7041, 16_817)  # the largest there is; red when a cut of long runs falls into the name of a place
def test_an_image_prompt_is_as_wide_as_its_tokens(width, height, tokens):
    ids = TINY.encode(image_prompt(width, height, tokens), markers=True)
    assert ids.count(TINY.special_id("<|media_pad|>")) == tokens
    assert ids[0] == TINY.special_id("<|media_begin|>")
    assert ids[-1] == TINY.special_id("<|media_end|>")
