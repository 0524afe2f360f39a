"""The `openai` client against a server on the real engine: the quick model, its own tokenizer, grammars and all.

Every request asks for something that only the full program does (``min_p``), so that one decode program is compiled here.
"""

import gc
import json
import math
import resource
import sys
import time

import numpy as np
import openai
import pytest

import kimi_jax
from kimi_jax.engine.budget import engine_limits
from kimi_jax.engine.engine import Engine
from kimi_jax.serve.model import served
from kimi_jax.serve.scoring import Scorer
from tests.parity.compilations import compilations
from tests.serve.loopback import serving, wait_for
from tests.serve.model import folder, tokenizer
from tests.serve.test_load import run_crowd

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
FULL = {"min_p": 1e-6}
FORM = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["alpha", "beta"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "choose", "strict": True, "parameters": FORM}}


class Unwarmed(Engine):
    """Compiles when a program is first called."""

    def warm(self):
        pass


def make_engine(kind, slots=4, **options):
    kimi = kimi_jax.load(folder(), dtype="float32", prefill_chunk=16, decode_block=4)
    runner = kimi.runner
    limits = engine_limits(runner.steps, slots=slots, chunk=16)
    engine = kind.build(runner.steps, runner.params, runner.allowed, limits)
    return kimi, engine, served(kimi, engine, ["quick"], **options)


@pytest.fixture(scope="module")
def running():
    _, engine, model = make_engine(Unwarmed)
    with serving(engine, model=model) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.url, api_key="x", max_retries=0, timeout=300) as client:
        yield client


def chat(client, **fields):
    extra = {**FULL, **fields.pop("extra_body", {})}
    named = {"model": "quick", "messages": QUESTION, "max_tokens": 12, "seed": 5, **fields}
    return client.chat.completions.create(**named, extra_body=extra)


def seen(choice):
    return choice.message.content, getattr(choice.message, "reasoning_content", None), choice.finish_reason


class TestAnswers:
    @pytest.mark.slow
    def test_seeds(self, client):
        one, again, other = chat(client), chat(client), chat(client, seed=6)
        assert one.usage.completion_tokens == 12
        assert seen(one.choices[0]) == seen(again.choices[0])
        assert seen(one.choices[0]) != seen(other.choices[0])  # red when the seed is lost on its way
        both = chat(client, n=2)
        assert [seen(c) for c in both.choices] == [seen(one.choices[0]), seen(other.choices[0])]  # PF-72

    def test_a_prefix_hit_is_told_and_changes_nothing(self, client, running):
        cold = [{"role": "user", "content": "Tell me about boats, one two three."}]
        first, second = chat(client, messages=cold), chat(client, messages=cold)
        assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
        assert seen(first.choices[0]) == seen(second.choices[0])

    def test_stream_is_the_whole(self, client):
        whole = chat(client, reasoning_effort="none", max_tokens=20)
        parts = list(chat(client, reasoning_effort="none", max_tokens=20, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        assert parts[-1].choices[0].finish_reason == "length"

    def test_bias_and_stops(self, client):
        token = tokenizer().encode("a")[0]
        done = chat(client, logit_bias={str(token): 100}, reasoning_effort="none", max_tokens=5)
        assert done.choices[0].message.content == "aaaaa"
        done = chat(
            client, logit_bias={str(token): 100}, reasoning_effort="none", extra_body={"stop_token_ids": [token]}
        )
        assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("stop", 1)
        done = chat(client, logit_bias={str(token): 100}, reasoning_effort="none", stop=["aaa"])
        assert (done.choices[0].finish_reason, done.choices[0].message.content) == (
            "stop",
            None,
        )  # no part of it (PF-69)

    def test_logprobs(self, client):
        done = chat(client, temperature=0, logprobs=True, top_logprobs=20)
        scores = done.choices[0].logprobs.content
        assert len(scores) == 12
        for score in scores:
            tops = [top.logprob for top in score.top_logprobs]
            assert tops == sorted(tops, reverse=True) and len(tops) == 20
            assert sum(map(math.exp, tops)) <= 1.0001
            assert score.logprob == tops[0] and score.bytes == score.top_logprobs[0].bytes  # greedy takes the likeliest

    def test_completions(self, client):
        text = {"model": "quick", "prompt": ["One two", "three"], "max_tokens": 4, "temperature": 0, "extra_body": FULL}
        together = client.completions.create(**text).choices
        alone = [client.completions.create(**{**text, "prompt": one}).choices[0] for one in text["prompt"]]
        assert [choice.text for choice in together] == [choice.text for choice in alone]


class TestForms:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_json_schema(self, client, seed):
        form = {"type": "json_schema", "json_schema": {"name": "choice", "strict": True, "schema": FORM}}
        done = chat(client, response_format=form, reasoning_effort="none", seed=seed, max_tokens=200, temperature=1.5)
        value = json.loads(done.choices[0].message.content)  # red: a random model writes no JSON by itself
        assert set(value) == {"ok", "word"} and value["word"] in ("alpha", "beta") and isinstance(value["ok"], bool)
        assert done.choices[0].finish_reason == "stop"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_that_must_be_made(self, client, stream):
        choice = {"type": "function", "function": {"name": "choose"}}
        end = {
            str(number): 100 for number in tokenizer().encode("<|close|>", markers=True)
        }  # so that the text before ends
        asked = {
            "tools": [TOOL],
            "tool_choice": choice,
            "reasoning_effort": "none",
            "max_tokens": 300,
            "logit_bias": end,
        }
        done = chat(client, **asked, stream=stream)
        if stream:
            deltas = [call for part in done for call in part.choices[0].delta.tool_calls or ()]
            name, arguments = deltas[0].function.name, "".join(delta.function.arguments for delta in deltas)
        else:
            (call,) = done.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
            assert done.choices[0].finish_reason == "tool_calls"
        assert name == "choose"
        assert set(json.loads(arguments)) == {"ok", "word"}


def test_leaving_frees_the_slot(client, running):
    with chat(client, stream=True, max_tokens=800) as stream:
        next(iter(stream))
    wait_for(lambda: running.server.pump.stats.running == 0, 20)
    assert running.server.pump.stats.pages_used == 0


@pytest.fixture(scope="module")
def warmed():
    """Another server on an engine of the usual sizes, which has compiled everything."""
    kimi, engine, model = make_engine(Engine, slots=8, scores_prompts=True)
    with (
        serving(engine, model=model, scorer=Scorer(kimi.runner)) as running,
        openai.OpenAI(base_url=running.url, api_key="x", max_retries=0, timeout=300) as client,
    ):
        yield kimi, running, client


@pytest.mark.slow
class TestWarmedUp:
    def test_nothing_compiles_any_more(self, warmed):  # PF-64
        kimi, _, client = warmed
        mixes = [
            {"temperature": 0},
            {},
            {"n": 3, "logprobs": True, "top_logprobs": 3},
            {"messages": [{"role": "user", "content": "long " * 60}], "presence_penalty": 1, "seed": 3},
            {"response_format": {"type": "json_object"}, "reasoning_effort": "none"},
            {"logit_bias": {"5": 3}, "stream": True},
        ]
        with compilations() as compiled:
            for fields in mixes:
                named = {"model": "quick", "messages": QUESTION, "max_tokens": 9, "seed": 1, **fields}
                done = client.chat.completions.create(**named)
                assert not fields.get("stream") or list(done)
            client.completions.create(model="quick", prompt="x y z", echo=True, logprobs=3, max_tokens=1)
            assert compiled() == 0
        greedy = client.chat.completions.create(model="quick", messages=QUESTION, max_tokens=24, temperature=0)
        alone = kimi.generate(QUESTION, 24)
        assert greedy.choices[0].message.reasoning_content == alone.reasoning  # the server changes nothing of the model

    def test_scores_of_a_prompt(self, warmed):
        """What lm-eval's choice tasks ask for, against the model's own logits."""
        kimi, _, client = warmed
        prompt = np.random.default_rng(0).integers(4, 500, 40).tolist()  # three calls of 16, the last one short
        done = client.completions.create(model="quick", prompt=prompt, echo=True, logprobs=3, max_tokens=0)
        scores = done.choices[0].logprobs
        logits = kimi.logits(prompt).astype(np.float64)
        expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[:-1]
        assert scores.token_logprobs[0] is None
        drawn = expected[np.arange(39), prompt[1:]]
        np.testing.assert_allclose(scores.token_logprobs[1:], drawn, atol=1e-4)  # red: off by one
        for top, row in zip(scores.top_logprobs[1:], expected, strict=True):
            np.testing.assert_allclose(sorted(top.values())[-3:], np.sort(row)[-3:], atol=1e-4)

    def test_a_large_crowd(self, warmed):
        """What it measures is printed with ``-s``."""
        _, running, _ = warmed
        run_crowd(running, clients=64, requests=100, seed=2)
        gc.collect()
        before, drawn = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, running.server.pump.stats.drawn_tokens
        began = time.monotonic()
        tally = run_crowd(running, clients=64, requests=1000, seed=3)
        seconds, drawn = time.monotonic() - began, running.server.pump.stats.drawn_tokens - drawn
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{tally}: {seconds:.0f} s, {drawn / seconds:.0f} tokens/s, {grown:.0f} MB more", file=sys.stderr)
        assert grown < 60  # red when answers or requests are kept
