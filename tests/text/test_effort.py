import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.effort import resolve_thinking
from kimi_jax.text.errors import ChatError
from kimi_jax.text.render import render
from kimi_jax.text.tool_choice import ToolChoice, resolve_tool_choice
from tests.text.data import cases

GOLDEN = cases("request_mapping.json")
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def resolve(request, **options):
    return resolve_thinking(
        request.get("reasoning_effort"), request.get("chat_template_kwargs"), request.get("thinking"), **options
    )


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden(name):
    case = GOLDEN[name]
    if "error" in case["expected"]:
        with pytest.raises(ChatError):
            resolve(case["request"])
    else:
        # Red when `thinking` does not win over reasoning_effort, or medium is passed on.
        assert resolve(case["request"]) == (case["expected"]["thinking"], case["expected"]["thinking_effort"])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, (False, "max")),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, (True, "max")),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, (True, "max")),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, (True, "max")),
        ({"chat_template_kwargs": {"thinking": None, "enable_thinking": False}}, (False, "max")),
        ({"chat_template_kwargs": {"thinking_effort": None}}, (True, None)),
        ({"chat_template_kwargs": {"thinking": False, "thinking_effort": "huge"}}, (False, "max")),
        ({"chat_template_kwargs": None, "thinking": None}, (True, "max")),
    ],
)
def test_what_wins(request_, expected):
    assert resolve(request_) == expected


@pytest.mark.parametrize(
    "request_",
    [
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_a_model_that_always_thinks(request_):
    with pytest.raises(ChatError, match="always thinks"):
        resolve(request_, can_disable=False)


def test_k3_1_pro_maps_the_same_efforts():
    asked = ["low", "medium", "high", "xhigh", "max", None]
    found = [resolve({"reasoning_effort": one}, can_disable=False).effort for one in asked]
    assert found == ["low", "high", "high", "max", "max", "max"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"reasoning_effort": 5}, "reasoning_effort is 5"),
        ({"reasoning_effort": ["low"]}, "of type list"),
        ({"chat_template_kwargs": {"thinking_effort": "medium"}}, "values that work: low, high, max, null"),
        ({"chat_template_kwargs": {"thinking": "false"}}, "true and false work"),
        ({"chat_template_kwargs": {"enable_thinking": 0}}, "true and false work"),
        ({"chat_template_kwargs": ["thinking"]}, "an object works"),
        ({"thinking": True}, "an object works"),
        ({"thinking": {"type": "adaptive"}}, "enabled and disabled work"),
        ({"thinking": {"type": ["enabled"]}}, "enabled and disabled work"),
        ({"reasoning_effort": "x", "thinking": {"type": "y"}}, "2 problems"),
    ],
)
def test_what_is_refused(request_, said):
    with pytest.raises(ChatError, match=said):
        resolve(request_)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(["low", "none", "max", "x"]),
    st.lists(st.text(), max_size=1),
)
FIELDS = st.one_of(
    VALUES, st.dictionaries(st.sampled_from(["thinking", "enable_thinking", "thinking_effort", "type"]), VALUES)
)


@given(VALUES, FIELDS, FIELDS, st.booleans())
def test_a_resolved_request_can_be_rendered(effort, kwargs, thinking, can_disable):
    try:
        found = resolve_thinking(effort, kwargs, thinking, can_disable=can_disable)
    except ChatError:
        return
    assert found.thinking or can_disable
    render([{"role": "user", "content": "x"}], thinking=found.thinking, effort=found.effort)


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, None, ToolChoice("none")),
        (None, TOOLS, ToolChoice("auto")),
        ("required", TOOLS, ToolChoice("required")),
        ({"type": "function", "function": {"name": "clock"}}, TOOLS, ToolChoice("named", "clock")),
    ],
)
def test_tool_choice(choice, tools, expected):
    assert resolve_tool_choice(choice, tools) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "said"),
    [
        ("auto", None, "no tools"),
        ("none", [], "no tools"),
        ("any", TOOLS, '"required"'),
        ({"type": "function"}, TOOLS, '"required"'),
        ({"function": {"name": "cook"}}, TOOLS, "names 'cook'; the tools of this request are 'clock'"),
        (["auto"], TOOLS, "of type list"),
    ],
)
def test_tool_choice_that_is_refused(choice, tools, said):
    with pytest.raises(ChatError, match=said):
        resolve_tool_choice(choice, tools)
