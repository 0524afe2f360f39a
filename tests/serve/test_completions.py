"""/v1/completions, /tokenize, /detokenize and /v1/models on a written engine."""

import dataclasses
import itertools
import json
import math

import pytest

from kimi_jax.engine.request import Event
from tests.serve.client import ask, run
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, NAMES, reply, served, tokenizer

PATH = "/v1/completions"


def fake(text="a b c <|open|>", **options):
    return FakeEngine(served().vocab, reply(text), capacity=CAPACITY, **options)


def post(engine, path=PATH, **fields):
    return run(engine, lambda app: ask(app, path, fields))


def test_a_text_is_continued_as_it_is():
    engine = fake()
    got = post(engine, prompt="Once <|open|>", max_tokens=3).json
    assert list(engine.seen[0].ids) == tokenizer().encode("Once <|open|>")  # red when a template or markers are applied
    assert got["object"] == "text_completion"
    assert got["choices"] == [
        {"index": 0, "text": tokenizer().decode(reply("a b c")[:3]), "logprobs": None, "finish_reason": "length"}
    ]
    assert got["usage"]["completion_tokens"] == 3 and "completion_tokens_details" not in got["usage"]


def test_sixteen_tokens_unless_said():
    engine = fake()
    post(engine, prompt="x")
    assert engine.seen[0].max_tokens == 16


def test_prompts_of_both_kinds_and_several_answers_each():
    engine = FakeEngine(served().vocab, lambda request: [request.ids[0]], capacity=CAPACITY, slots=3)
    got = post(engine, prompt=["x", [9, 8]], n=2, max_tokens=1, seed=5).json
    assert [list(request.ids) for request in engine.seen] == [tokenizer().encode("x")] * 2 + [[9, 8]] * 2
    assert [request.seed for request in engine.seen] == [5, 6, 5, 6]
    expected = [tokenizer().decode([request.ids[0]]) for request in engine.seen]
    assert [choice["text"] for choice in got["choices"]] == expected
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["prompt_tokens"] == len(tokenizer().encode("x")) + 2


def test_echo():
    assert post(fake(), prompt="Once", echo=True, max_tokens=1).json["choices"][0][
        "text"
    ] == "Once" + tokenizer().decode(reply("a")[:1])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_nothing_more(stream):  # PF-70
    engine = fake()
    got = post(engine, prompt=["Once", [*tokenizer().encode("upon")]], echo=True, max_tokens=0, stream=stream)
    events = got.events[:-1] if stream else [got.json]
    texts = ["", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Once", "upon"]
    assert engine.seen == []  # red when 0 counts as missing


def test_stream():
    events = post(fake(), prompt="x", max_tokens=5, stream=True, stream_options={"include_usage": True}).events
    assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == 5
    text = "".join(c["text"] for e in events[:-2] for c in e["choices"])
    assert text == tokenizer().decode(reply("a b c <|open|>")[:5])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream):
    engine = FakeEngine(
        served().vocab, [*reply("a"), *tokenizer().encode("世")[:1], *reply("b")], capacity=CAPACITY, block=1
    )
    got = post(engine, prompt="x", max_tokens=3, logprobs=2, stream=stream, echo=False)
    events = got.events[:-1] if stream else [got.json]
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert tokens[0] == "a"
    assert all(list(part) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"] for part in parts)
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[1] == 1  # red when each chunk starts from 0
    alternatives = [top for part in parts for top in part["top_logprobs"]]
    assert all(set(top.values()) <= {-0.5, -9999.0} and tokens[at] in top for at, top in enumerate(alternatives))


class WrittenScorer:
    """Scores the token at a place of a prompt with minus the place."""

    def scores(self, ids, top):
        yield [Event(0, ids[0], math.nan)]
        for place, token in enumerate(ids[1:], 1):
            yield [Event(0, token, -float(place), None, tuple((other, -1.0) for other in range(top)))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_echo_with_logprobs(stream, most):
    """What lm-eval asks for: the scores of a prompt in front of those of the answer."""
    engine = fake()
    model = dataclasses.replace(served(), scores_prompts=True)
    body = {"prompt": ["Once", [9, 8, 7]], "echo": True, "logprobs": 2, "max_tokens": most, "stream": stream, "n": 2}
    got = run(engine, lambda app: ask(app, PATH, body), model=model, scorer=WrittenScorer())
    events = got.events[:-1] if stream else [got.json]
    for index, prompt in enumerate([tokenizer().encode("Once")] * 2 + [[9, 8, 7]] * 2):
        parts = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == tokenizer().decode(prompt + reply("a")[:most])
        scores = [part["logprobs"] for part in parts if part["logprobs"]]
        values = [value for part in scores for value in part["token_logprobs"]]
        assert values == [None, *(-place for place in range(1, len(prompt))), *[-0.5] * most]
        tops = [top for part in scores for top in part["top_logprobs"]]
        assert tops[0] is None and all(len(top) >= 2 for top in tops[1:])
        offsets = [offset for part in scores for offset in part["text_offset"]]
        lengths = [len(tokenizer().token_bytes(i).decode()) for i in (prompt + reply("a")[:most])]
        assert offsets == list(itertools.accumulate(lengths[:-1], initial=0))
    assert len(engine.seen) == 4 * most


def test_more_answers_than_may_ever_wait():
    model = dataclasses.replace(served(), queue=5)
    got = run(fake(), lambda app: ask(app, PATH, {"prompt": ["x"] * 3, "n": 2}), model=model)
    assert (
        got.status == 400 and "5 requests may wait" in got.error["message"]
    )  # red (429) when it is told to try again for ever


def test_too_many_prompt_scores():
    model = dataclasses.replace(served(), scores_prompts=True)
    body = {"prompt": [[1] * 900] * 60, "echo": True, "logprobs": 20, "max_tokens": 1}
    got = run(fake(), lambda app: ask(app, PATH, body), model=model, scorer=WrittenScorer())
    assert got.status == 400 and "1,134,000 log-probabilities" in got.error["message"]


def test_bytes_that_are_no_text_by_themselves():
    number = next(i for i in range(served().vocab) if tokenizer().token_bytes(i) == b"\xe4")
    got = post(FakeEngine(served().vocab, [number], capacity=CAPACITY), prompt="x", max_tokens=1, logprobs=0).json
    assert got["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe4"]


def test_tokenize_and_back():
    async def scenario(app):
        text = "Grüße <|open|> 世界"
        one = (await ask(app, "/tokenize", {"prompt": text, "return_token_strs": True})).json
        back = (await ask(app, "/detokenize", {"tokens": one["tokens"]})).json
        talk = (await ask(app, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json
        await ask(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        return text, one, back, talk

    engine = fake()
    text, one, back, talk = run(engine, scenario)
    assert one["tokens"] == tokenizer().encode(text) and one["count"] == len(one["tokens"])
    assert one["max_model_len"] == CAPACITY
    assert len(one["token_strs"]) == one["count"]
    assert back == {"prompt": text}
    assert talk["tokens"] == list(engine.seen[0].ids)  # red when the template of one of the two is another


def test_what_the_tokenizer_is():
    info = run(fake(), lambda app: ask(app, "/tokenizer_info")).json
    assert info["eos_token"] == "<|end_of_msg|>" and info["vocab_size"] == served().vocab


def test_models():
    async def scenario(app):
        return [await ask(app, path) for path in ("/v1/models", "/v1/models/kimi", "/v1/models/other")]

    listing, one, none = run(fake(), scenario)
    assert [entry["id"] for entry in listing.json["data"]] == list(NAMES)
    assert one.json["id"] == "kimi" and one.json["max_model_len"] == CAPACITY
    assert none.status == 404 and none.error["code"] == "model_not_found"


def test_another_name_of_the_model():
    async def scenario(app):
        return [await ask(app, PATH, {"prompt": "x", "model": name, "max_tokens": 1}) for name in ("kimi", "gpt-4")]

    known, unknown = run(fake(), scenario)
    assert known.json["model"] == "kimi"
    assert unknown.status == 404 and "Served: quick, kimi" in unknown.error["message"]


def test_metrics():
    async def scenario(app):
        await ask(app, PATH, {"prompt": "x", "max_tokens": 3})
        await ask(app, PATH, {"prompt": 5})
        await ask(app, "/nowhere")
        return (await ask(app, "/metrics")).body.decode()

    text = run(fake(), scenario)
    for line in (
        'kimi_jax_http_responses_total{path="/v1/completions",status="200"} 1.0',
        'kimi_jax_http_responses_total{path="/v1/completions",status="400"} 1.0',
        'kimi_jax_http_responses_total{path="other",status="404"} 1.0',  # red when strangers can make labels
        'kimi_jax_answers_total{reason="length"} 1.0',
        "kimi_jax_time_to_first_token_seconds_count 1.0",
        "kimi_jax_slots 4.0",
    ):
        assert line in text.splitlines(), line
    assert json.dumps("x") not in text
