"""The `openai` client against a server on a written engine: what it reads is what was written."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving, wait_for
from tests.serve.model import CAPACITY, reply, served, tokenizer
from tests.serve.test_chat import CALLS, END, SAID, THOUGHT, TOOLS

MODEL = "quick"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(served().vocab, capacity=CAPACITY, slots=4, queue=50)


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine, keys=("sk-secret",)) as running:
        yield running.url


@pytest.fixture
def client(engine, address):
    engine.answer, engine.pause = reply(THOUGHT + SAID + END), 0.0
    with openai.OpenAI(base_url=address, api_key="sk-secret", max_retries=0) as client:
        yield client


def test_chat(client):
    done = client.chat.completions.create(model=MODEL, messages=QUESTION)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "It is 4.", "stop")
    assert choice.message.reasoning_content == "Let me see."
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.completion_tokens_details.reasoning_tokens > 0


def test_conversations_go_on(client, engine):
    """What comes back can be sent again as it is."""
    engine.answer = reply(THOUGHT + SAID + CALLS + END)
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    said = done.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls]
    client.chat.completions.create(
        model=MODEL, messages=[*QUESTION, said.model_dump(), *reversed(results)], tools=TOOLS
    )
    prompt = tokenizer().decode(engine.seen[-1].ids)
    assert f"<|open|>think<|sep|>Let me see.<|close|>think<|sep|>{SAID}{CALLS}<|close|>message<|sep|>" in prompt
    assert 'role="tool" tool="weather" index="1"' in prompt  # red when the ids of calls are not their own


def test_stream(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    thought = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", "") or "" for chunk in chunks if chunk.choices
    )
    assert (said, thought) == ("It is 4.", "Let me see.")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(reply(THOUGHT + SAID + END))


def test_streamed_tools(client, engine):
    engine.answer, engine.pause = reply(THOUGHT + SAID + CALLS + END), 0.002
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
        for _ in stream:
            pass
        done = stream.get_final_completion()  # the client's own way of adding deltas up
    weather, clock = done.choices[0].message.tool_calls
    assert json.loads(weather.function.arguments) == {"city": 'Os"lo\n', "days": 2}
    assert (clock.function.name, json.loads(clock.function.arguments)) == ("clock", {})
    assert done.choices[0].finish_reason == "tool_calls"


def test_logprobs(client):
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2)
    scores = done.choices[0].logprobs.content
    assert b"".join(bytes(score.bytes) for score in scores).decode() == THOUGHT + SAID + "<|close|>message<|sep|>"
    assert all(len(score.top_logprobs) == 2 for score in scores)


def test_several_answers(client, engine):
    engine.answer = lambda request: reply(f"<|close|>think<|sep|><|open|>response<|sep|>{request.seed}" + END)
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, n=4, seed=7)
    assert [choice.message.content for choice in done.choices] == ["7", "8", "9", "10"]


def test_completions(client, engine):
    engine.answer = reply("a b")
    done = client.completions.create(model=MODEL, prompt=["x", "y"], max_tokens=2, echo=True)
    assert [choice.text[0] for choice in done.choices] == ["x", "y"]
    streamed = client.completions.create(model=MODEL, prompt="x", max_tokens=3, stream=True, logprobs=1)
    assert "".join(chunk.choices[0].text for chunk in streamed) == tokenizer().decode(reply("a b")[:3])


def test_models(client):
    assert [model.id for model in client.models.list()] == ["quick", "kimi"]
    assert client.models.retrieve("kimi").id == "kimi"


def test_json_schema_reaches_the_engine_as_a_grammar(client, engine):
    """The written engine does not obey it; that it does is the business of the real one."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form, n=2)
    first, second = engine.seen[-2:]
    assert first.grammar is not None
    assert first.grammar is not second.grammar  # red when two answers share one state
    bits = first.grammar.mask()
    allowed = [i for i in range(served().vocab) if bits[i // 32] >> (i % 32) & 1]
    assert reply("a")[0] in allowed  # thoughts are free
    client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    assert engine.seen[-1].grammar is None
    client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="required")
    assert engine.seen[-1].grammar is not None


def test_a_grammar_that_gives_up_ends_its_answer_alone(client, engine):
    from kimi_jax.serve.constrain import GuardedGrammar
    from kimi_jax.text.grammar import GrammarFailed

    class Broken:
        finished = False

        def mask(self):
            raise GrammarFailed("too complex")

        accept = mask

    end = tokenizer().special_id("<|end_of_msg|>")
    guarded = GuardedGrammar(Broken(), end, served().vocab)
    bits = guarded.mask()  # red (GrammarFailed) when it would end the engine
    assert [i for i in range(served().vocab) if bits[i // 32] >> (i % 32) & 1] == [end]
    guarded.accept(end)
    assert guarded.finished and guarded.failure == "too complex"

    def give_up(request):
        request.grammar.failure = "too complex"
        return [end]

    engine.answer = give_up
    with pytest.raises(openai.InternalServerError, match="could not be enforced: too complex"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format={"type": "json_object"})


class TestErrors:
    def test_kinds(self, client, address):
        with pytest.raises(openai.NotFoundError, match="Served: quick, kimi"):
            client.chat.completions.create(model="gpt-4", messages=QUESTION)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=5, top_p=7)
        assert caught.value.body["param"] == "temperature" and len(caught.value.body["problems"]) == 2
        stranger = openai.OpenAI(base_url=address, api_key="sk-other", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()

    def test_a_failure_in_a_stream_is_raised(self, client, engine):
        engine.broken.add(1000 + len(engine.seen) + 1)
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True))

    def test_a_full_queue_is_tried_again(self, address, engine):
        """The client waits as long as Retry-After says."""
        engine.answer = reply("<|close|>think<|sep|>" + SAID + END)
        full = FakeEngine(served().vocab, engine.answer, capacity=CAPACITY, slots=1, queue=1)
        full.hold.set()
        with serving(full) as other, openai.OpenAI(base_url=other.url, api_key="x", max_retries=0) as client:
            first = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=QUESTION)
            assert caught.value.response.headers["retry-after"] == "3"
            full.hold.clear()
            assert list(first)[-1].choices[0].finish_reason == "stop"
            assert client.chat.completions.create(model=MODEL, messages=QUESTION).choices[0].finish_reason == "stop"


class TestLeaving:
    def test_closing_a_stream_frees_the_slot(self, client, engine):  # PF-73
        engine.answer, engine.pause = [], 0.002
        before = len(engine.cancelled)
        with client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True) as stream:
            next(iter(stream))
        wait_for(lambda: len(engine.cancelled) == before + 1, 5)  # red when only a failed write is noticed

    def test_leaving_before_the_answer(self, client, engine):
        engine.answer, engine.pause = [], 0.002
        before = len(engine.cancelled)
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=QUESTION, timeout=0.3)
        wait_for(lambda: len(engine.cancelled) == before + 1, 5)  # red when nobody listens for the disconnect


def test_draining_lets_answers_end():
    engine = FakeEngine(served().vocab, reply(THOUGHT + SAID + END), capacity=CAPACITY)
    engine.hold.set()
    with (
        serving(engine) as running,
        openai.OpenAI(base_url=running.url, api_key="x", max_retries=0) as client,
        ThreadPoolExecutor() as pool,
    ):
        asking = pool.submit(client.chat.completions.create, model=MODEL, messages=QUESTION)
        streamed = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        wait_for(lambda: len(engine.seen) == 2)
        running.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: not running.server.servers[0].is_serving())
        with pytest.raises(openai.APIConnectionError):
            openai.OpenAI(base_url=running.url, api_key="x", max_retries=0).models.list()
        engine.hold.clear()
        assert asking.result(20).choices[0].message.content == "It is 4."  # red when what is under way is cut off
        assert list(streamed)[-1].choices[0].finish_reason == "stop"
