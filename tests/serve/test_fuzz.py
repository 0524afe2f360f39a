"""Bodies that are wrong in every way a machine can think of: never a 500, never a hang, always a well-formed error."""

import asyncio
import copy
import json
import random
from typing import Any

import pytest

from tests.serve.client import ask, run
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, reply, served

TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}}}  # fmt: skip
CHAT = {
    "model": "quick", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["x"], "stream": False,
    "messages": [
        {"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "t"},
    ],
    "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1},
    "response_format": {"type": "text"}, "chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low",
}  # fmt: skip
TEXT = {"prompt": ["x", [5, 6]], "max_tokens": 3, "logprobs": 1, "n": 2, "stop": "y", "echo": False, "stream": True}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 10**25, -(10**400), "", "x", "\ud800", "\x00", "<|open|>", "auto",
    "user", "tool", "json_schema",    [], [[]], {}, {"": None}, [None], ["x", 5], {"type": "json_object"},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    "x" * 3000, [0] * 3000, {"function": {"name": "f"}}, {"type": "object", "$ref": "#/a"}, float("nan"), float("inf"),
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something can be changed."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(body: Any, dice: random.Random) -> bytes:
    body = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 3)):
        *way, last = dice.choice(places(body))
        try:
            inner = body
            for key in way:
                inner = inner[key]
            match dice.randrange(4):
                case 0 | 1:
                    inner[last] = copy.deepcopy(dice.choice(ODD))
                case 2:
                    del inner[last]
                case 3 if isinstance(inner, dict):
                    inner[dice.choice(["x", "", "\ud800", "strict", "$defs", "name", "n", "stream"])] = copy.deepcopy(
                        dice.choice(ODD)
                    )
        except (KeyError, IndexError, TypeError):
            continue
        if not places(body):
            break
    raw = json.dumps(body, ensure_ascii=dice.random() < 0.8).encode(errors="surrogatepass")
    match dice.randrange(12):
        case 0:
            return raw[: dice.randrange(len(raw))]
        case 1:
            at = dice.randrange(len(raw))
            return raw[:at] + dice.randbytes(dice.randint(1, 4)) + raw[at + 1 :]
        case 2:
            at = dice.randrange(len(raw))
            return (
                raw[:at]
                + dice.choice([b"[" * 500, b'"', b"{", b"\\u", b"\\ud800", b",", b"1e9999", b"\xff"])
                + raw[at:]
            )
        case 3:
            return dice.randbytes(dice.randrange(200))
    return raw


async def storm(app, count: int, seed: int) -> dict[int, int]:
    dice, statuses = random.Random(seed), {}
    for _ in range(count):
        path = dice.choice(list(BODIES) + ["/v1/chat/completions"] * 3)
        body = mutated(BODIES[path], dice)
        try:
            got = await asyncio.wait_for(ask(app, path, body), 20)
        except Exception as error:
            raise AssertionError(f"{path} {body!r}") from error
        assert got.status == 200 or 400 <= got.status < 500, (path, body, got)
        if got.status >= 400:
            error = got.error
            assert error["message"] and error["type"] and len(got.body) < 20_000, (path, body, got)
        statuses[got.status] = statuses.get(got.status, 0) + 1
    return statuses


@pytest.mark.parametrize(("count", "seed"), [(500, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)])
def test_malformed_bodies(count, seed):
    engine = FakeEngine(served().vocab, reply("<|close|>think<|sep|>yes"), capacity=CAPACITY, queue=10**6)

    async def scenario(app):
        statuses = await storm(app, count, seed)
        assert (await ask(app, "/ready")).status == 200
        assert (await ask(app, "/v1/chat/completions", {**CHAT, "stop": []})).status == 200
        return statuses

    statuses = run(engine, scenario)
    assert statuses[400] > count / 2  # red when the mutations are too tame to find anything
    assert statuses.get(200, 0) > count / 50
    assert engine.idle
