"""What is refused, and how: every problem at once, each with its limit and what works."""

import asyncio
import json
import threading

import numpy as np
import pytest

from kimi_jax.serve import errors, limits
from kimi_jax.serve.body import parse_body
from kimi_jax.serve.constrain import GuardedGrammar
from kimi_jax.serve.errors import ApiError, encode
from kimi_jax.text import tokenizer as tokenizer_module
from kimi_jax.text.grammar import GrammarFailed
from kimi_jax.text.tokenizer import SLICE, pieces
from tests.serve.client import Call, ask, run
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def send(path, *bodies):
    async def scenario(app):
        return [await ask(app, path, body) for body in bodies]

    engine = FakeEngine(served().vocab, capacity=CAPACITY)
    got = run(engine, scenario)
    assert not engine.seen  # red when something refused was started
    return got


def refused(path, body):
    (got,) = send(path, body)
    assert got.status == 400, got.body
    assert got.error["type"] == "invalid_request_error"
    return got.error


NUMBERS = [
    ("n", 0, limits.CHOICES + 1),
    ("temperature", -0.1, 2.1),
    ("top_p", 0, 1.1),
    ("top_k", -2, limits.TOKENS + 1),
    ("min_p", -0.1, 1.1),
    ("presence_penalty", -2.1, 2.1),
    ("frequency_penalty", -2.1, 2.1),
    ("repetition_penalty", 0, 101),
    ("seed", -(1 << 63) - 1, 1 << 63),
    ("max_tokens", -1, limits.TOKENS + 1),
]


@pytest.mark.parametrize(
    ("name", "low", "high"), [*NUMBERS, ("top_logprobs", -1, 21), ("max_completion_tokens", 0, 1 << 31)]
)
def test_numbers_of_a_chat(name, low, high):
    for value in (low, high, "5", True, [5], 10**400):
        error = refused(CHAT, {**QUESTION, "logprobs": True, name: value})  # red for each limit that is not checked
        assert name in error["message"]
        assert error["param"] == name


def test_a_number_that_only_python_calls_one():
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999, "top_p": -1e999}'
    assert len(refused(CHAT, body)["problems"]) == 2  # red when infinity is within the limits


@pytest.mark.parametrize(("name", "low", "high"), [*NUMBERS, ("logprobs", -1, 21)])
def test_numbers_of_a_completion(name, low, high):
    for value in (low, high, "5", True):
        assert name in refused(TEXT, {"prompt": "x", name: value})["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages is 'x'; it must be a valid list"),
        ({"messages": ["x"]}, "messages[0] is 'x'"),
        ({"messages": [{"role": "user"}] * (limits.MESSAGES + 1)}, "10000 items"),
        ({"messages": [{"role": "robot", "content": ""}]}, "roles that work: system"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "is an image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "without text"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "16 items"),
        ({"stop": "x" * 1025}, "1024 characters"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1 << 40]}, "ids go from 0 to 519"),
        ({"stop_token_ids": list(range(13))}, "12 items"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5 is 101"),
        ({"logit_bias": {"520": 1}}, "keys are token ids from 0 to 519"),
        ({"logit_bias": {"-1": 1}}, "keys are token ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias names 'x'"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias names"),  # a digit to Python, no number to JSON
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "300 items"),
        ({"tools": [TOOL] * 513}, "512 items"),
        ({"tools": [{}]}, 'tools[0] is no {"type": "function"'),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name is ''"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "up to 256 characters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "parameters is 5"),
        ({"tool_choice": "auto"}, "the request has no tools"),
        ({"tools": [TOOL], "tool_choice": "g"}, "tool_choice is 'g'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "the tools of this request are 'f'"),
        ({"response_format": {"type": "yaml"}}, "types that work"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "json_schema"),
        ({"reasoning_effort": "minimal"}, "values that work: low, high, max, medium, xhigh, none"),
        ({"chat_template_kwargs": {"thinkin": 1}}, 'did you mean "thinking"'),
        ({"chat_template_kwargs": {"thinking": 1}}, "true and false work"),
        ({"thinking": {"type": "perhaps"}}, "enabled and disabled work"),
        ({"top_logprobs": 1}, "logprobs: true works"),
        ({"stream_options": {}}, "stream: true"),
        ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "give one"),
        ({"functions": []}, "tools works"),
        ({"temprature": 1}, "did you mean temperature?"),
        ({"user": 5}, "user is 5"),
        ({"metadata": {str(i): "" for i in range(17)}}, "16 items"),
        ({"model": ""}, "model"),
        ({"model": "x" * 257}, "256 characters"),
        ({"modalities": ["audio"]}, "modalities[0]"),
    ],
)  # fmt: skip
def test_of_a_chat(fields, said):
    error = refused(CHAT, {**QUESTION, **fields})
    assert said in error["message"]
    assert len(encode(error)) < 4000


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [5, "x"]}, "prompt 0 is neither"),
        ({"prompt": [True]}, "prompt 0 is neither"),
        ({"prompt": {"a": 1}}, "a list of token ids"),
        ({"prompt": 5}, "a list of token ids"),
        ({"prompt": [5, -1]}, "ids such as -1; ids go from 0 to 519"),  # PF-63
        ({"prompt": [[5], [520]]}, "prompt 1 holds 1 ids such as 520"),
        ({"prompt": [10**30]}, "ids go from 0 to 519"),
        ({"prompt": "\ud800x"}, "half a surrogate pair"),
        ({"prompt": ["x"] * 129}, "128 items"),
        ({"prompt": ["x"] * 100, "n": 3}, "300 answers; up to 256"),
        ({"prompt": "x", "max_tokens": 0}, "echo: true, works"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "started with --enable-prompt-logprobs"),
        ({"prompt": "x", "best_of": 2}, "only equal values work"),
        ({"prompt": "x", "suffix": "y"}, "does not fill in the middle"),
        (
            {"prompt": [1] * CAPACITY},
            "has 1,024 tokens and this server holds 1,024 of prompt and answer; up to 1,023 work",
        ),
        ({}, "prompt is missing"),
    ],
)
def test_of_a_completion(fields, said):
    assert said in refused(TEXT, fields)["message"]


def test_a_long_conversation_has_its_own_code():  # PF-75
    error = refused(CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]})
    assert error["code"] == "context_length_exceeded"
    assert "up to 1,023 work" in error["message"] and "--max-model-len" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "neither is given"),
        ("/tokenize", {"prompt": "x", "messages": [{}]}, "both are given"),
        ("/tokenize", {"messages": [{}]}, "roles that work"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [520]}, "ids go from 0 to 519"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_of_the_tokenizer(path, body, said):
    assert said in refused(path, body)["message"]


def test_every_problem_at_once():
    body = {"messages": [{"role": "robot"}, {"role": "user", "content": 5}], "tools": [{}, {"type": "function"}],
            "chat_template_kwargs": {"a": 1}, "logit_bias": {"x": 1}, "stop_token_ids": [600]}  # fmt: skip
    error = refused(CHAT, body)
    for said in (
        "messages[0]",
        "messages[1]",
        "tools[0]",
        "tools[1]",
        "chat_template_kwargs",
        "logit_bias",
        "stop_token_ids",
    ):
        assert said in error["message"]  # red when the first problem stops the search
    assert len(error["problems"]) >= 7
    typed = refused(CHAT, {"temperature": 9, "top_p": 9, "what": 1})
    assert len(typed["problems"]) == 4  # and messages are missing


def test_no_error_is_endless():
    error = refused(CHAT, {"messages": [{"role": "x" * 1000, "content": ""}] * 5000, "y" * 100_000: 1})
    assert len(encode(error)) < 10_000
    error = refused(CHAT, {"messages": [{"role": "x" * 1000, "content": ""}] * 5000})
    assert len(error["problems"]) == limits.PROBLEMS + 1
    assert "and 4,980 more problems" in error["message"]
    assert len(encode(error)) < 10_000


def test_the_work_for_an_error_is_small(monkeypatch):
    sought = []
    monkeypatch.setattr(errors.difflib, "get_close_matches", lambda name, *_, **__: sought.append(name) or [])
    error = refused(CHAT, {**QUESTION, **{f"k{n}": 1 for n in range(5000)}})
    assert "and 4,980 more problems" in error["message"]
    assert len(sought) <= limits.PROBLEMS  # red when a near name of each unknown field is looked for


@pytest.fixture
def encoded(monkeypatch):
    """Texts that were encoded, as the tokenizer cuts them."""
    texts = []
    noted = lambda text: texts.append(text) or text  # noqa: E731
    monkeypatch.setattr(tokenizer_module, "pieces", lambda text: map(noted, pieces(text)))
    return texts


def test_a_prompt_is_not_encoded_further_than_what_decides(encoded):
    call = {"name": "f", "arguments": json.dumps({f"k{n}": n for n in range(2000)})}
    asks = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    error = refused(CHAT, {"messages": [*QUESTION["messages"], asks]})
    assert f"has more than {2 * CAPACITY:,} tokens" in error["message"]
    assert len(encoded) < 2 * CAPACITY  # red when every one of the 10,000 segments is


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}, f"more than {2 * CAPACITY:,} tokens"),
        (TEXT, lambda text: {"prompt": text}, f"more than {2 * CAPACITY:,} tokens"),
        ("/tokenize", lambda text: {"prompt": text}, "this is more than 5,000 tokens; up to as many are given"),
        ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}, "this is more than 5,000 tokens"),
    ],
)
def test_a_huge_text_is_not_encoded_to_its_end(path, body, said, encoded, monkeypatch):
    # red when a body of megabytes keeps a thread for as long as all of it takes
    monkeypatch.setattr(limits, "TOKENIZED", 5000)
    error = refused(path, body("ab " * SLICE))
    assert said in error["message"] and error["code"] == "context_length_exceeded"
    assert sum(map(len, encoded)) < 1.5 * SLICE


def test_preparation_has_threads_of_its_own():
    # red when a flood of long prompts keeps the server's other threads, and answers wait for them
    async def scenario(app):
        loop, go = asyncio.get_running_loop(), threading.Event()
        stuck = [loop.run_in_executor(None, go.wait, 60) for _ in range(64)]
        try:
            return await Call(app, "/tokenize", {"prompt": "a b"}).done(10)
        finally:
            go.set()
            await asyncio.gather(*stuck)

    assert run(FakeEngine(served().vocab, capacity=CAPACITY), scenario).json["count"] == 3


def test_a_form_that_says_nothing_is_refused():
    # red when it is taken: its answer failed with status 500
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"$ref": "#"}}}
    assert "leads back to itself" in refused(CHAT, {**QUESTION, "response_format": schema})["message"]
    assert "leads back to itself" in refused(CHAT, {**QUESTION, "tools": [tool]})["message"]


@pytest.mark.parametrize("error", [GrammarFailed("too complex"), ValueError("a fault")])
def test_a_grammar_that_fails_ends_its_answer_alone(error):
    class Failing:
        finished = False

        def mask(self):
            raise error

        def accept(self, token):
            raise error

    guarded = GuardedGrammar(Failing(), 40, served().vocab)  # pyright: ignore[reportArgumentType]
    bits = guarded.mask()  # red (raises, which ends the engine) when only some errors are foreseen
    assert guarded.finished and guarded.failure
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [40]
    other = GuardedGrammar(Failing(), 40, served().vocab)  # pyright: ignore[reportArgumentType]
    other.accept(3)
    assert other.finished and other.failure == guarded.failure


class TestJson:
    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"nonsense", "not JSON"),
            (b'{"a": NaN}', "NaN is no JSON value"),
            (b'{"a": -Infinity}', "-Infinity is no JSON value"),
            (b'{"a": 1}{', "not JSON"),
            (b"[]", "it is a list"),
            (b"null", "it is null"),
            (b"true", "it is a boolean"),
            (b"7", "it is a number"),
            (b'"x"', "it is a string"),
            (b'{"a": "\xff"}', "not UTF-8: byte 7"),
            (b"\xff\xfe{\x00}\x00", "not UTF-8"),
            (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 200"),
            (
                b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
                "nested deeper than 200",
            ),  # red: left to the interpreter's limit
            (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),  # Python's own limit for digits
            (b'{"a": 1' + b"0" * 3000 + b"}", "an integer of 9966 bits is too large"),
            (b'{"a": [' + b"," * (limits.JSON_MARKS + 1), "commas and brackets; at most 2,000,000"),
        ],
    )
    def test_what_is_no_object(self, body, said):
        with pytest.raises(ApiError) as caught:
            parse_body(body)
        assert caught.value.status == 400
        assert said in str(caught.value)

    def test_nulls_are_left_out_on_top_only(self):
        assert parse_body(b'{"a": null, "b": {"c": null}}') == {"b": {"c": None}}  # red when a tool's null is dropped

    def test_half_a_character_is_written_as_json_can(self):
        import json

        assert json.loads(encode({"a": "\ud800\u00e9"})) == {"a": "\ud800\u00e9"}  # red (UnicodeEncodeError) otherwise
        with pytest.raises(ValueError):
            encode({"a": float("nan")})


def test_a_model_that_always_thinks(monkeypatch):
    # red when K3.1 Pro is asked not to think (K3.1 Pro notes, section 12)
    monkeypatch.setitem(vars(served()), "always_thinks", True)
    asked = {**QUESTION, "thinking": {"type": "disabled"}}
    assert "always thinks" in refused(CHAT, asked)["message"]
