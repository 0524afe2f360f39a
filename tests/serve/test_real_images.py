"""The `openai` client shows pictures to a server on the real engine and tower: the joined model with room for conversations."""

import dataclasses

import openai
import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.engine.budget import engine_limits
from kimi_jax.serve.images import make_images
from kimi_jax.serve.limits import ImageLimits
from kimi_jax.serve.model import served
from tests.parity.joined import folder
from tests.parity.light import light_compilation as light_compilation
from tests.serve.eyes import file, part, url, user
from tests.serve.loopback import serving, wait_for
from tests.serve.test_real import Unwarmed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_compilation")]

FULL = {"min_p": 1e-6}
"""So that one decode program does for all."""

RED, BLUE = file((60, 40), 250), file((60, 40), 3)
"""Of 6 tokens."""


@pytest.fixture(scope="module")
def running(light_compilation):
    kimi = kimi_jax.load(folder(), dtype="float32", prefill_chunk=64, decode_block=4, max_seq_len=512)
    steps = dataclasses.replace(kimi.vision.steps, buckets=(1024,))
    kimi = Kimi(kimi.config, kimi.layout, kimi.tokenizer, kimi.runner, dataclasses.replace(kimi.vision, steps=steps))
    runner, images = kimi.runner, make_images(kimi.vision, ImageLimits(threads=1))
    limits = engine_limits(runner.steps, slots=4, page=16, chunk=64, tower=kimi.vision.steps)
    limits = dataclasses.replace(limits, spacing=16)
    engine = Unwarmed.build(runner.steps, runner.params, runner.allowed, limits, images=True)
    model = served(kimi, engine, ["joined"], images=True)
    with serving(engine, model=model, images=images) as running:
        running.server.images, running.server.kimi = images, kimi
        yield running


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.url, api_key="x", max_retries=0, timeout=600) as client:
        yield client


def chat(client, *messages, **fields):
    named = {
        "model": "joined",
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "reasoning_effort": "none",
        **fields,
    }
    return client.chat.completions.create(messages=list(messages), **named, extra_body=FULL)


def told(done):
    """Ids with their scores, and how many of the prompt's were found."""
    scores = [(score.token, round(score.logprob, 4)) for score in done.choices[0].logprobs.content]
    return scores, done.usage.prompt_tokens_details.cached_tokens


def test_a_picture_is_seen_and_found_again(client, running):
    # red when the rows of a picture do not reach the model, a hit is not what was run, or another picture counts as the same
    question = lambda data: user("Look at this, and look again:", data, "What is it?")  # noqa: E731
    red, cold = told(chat(client, question(RED)))
    blue, other = told(chat(client, question(BLUE)))
    again, found = told(chat(client, question(RED)))
    assert red == again != blue
    assert found > other >= cold
    assert found % 16 == 0 and found > chat(client, user("Look at this, and look again:")).usage.prompt_tokens - 16
    assert running.server.images.kept.hits == 1
    running.server.pump._engine.forget()
    assert told(chat(client, question(RED))) == (red, 0)


def test_two_pictures_of_two_formats_and_a_history(client):
    # red when pictures change places, or those of earlier turns are gone
    jpeg = part(url(file((60, 40), 250, "JPEG"), "jpeg"))
    first = user("One:", RED, "two:", BLUE)
    both, _ = told(chat(client, first))
    turned, _ = told(chat(client, user("One:", BLUE, "two:", RED)))
    assert both != turned
    done = chat(client, first, {"role": "assistant", "content": "Two."}, user("And:", jpeg))
    without = chat(client, user("One:", "two:"), {"role": "assistant", "content": "Two."}, user("And:"))
    assert done.usage.prompt_tokens - without.usage.prompt_tokens > 3 * (6 + 3)
    assert told(done)[0] != told(without)[0]


def test_the_server_says_what_the_model_says(client, running):
    # red when the server gives the model another prompt, or other rows, than the library does
    talk = [user("Say:", RED, "now", BLUE)]
    done = chat(client, *talk)
    alone = running.server.kimi.generate(talk, 8, thinking=False)
    assert (done.choices[0].message.content or "") == alone.text
    assert done.usage.prompt_tokens == alone.usage.prompt_tokens


def test_leaving_in_the_middle(client, running):
    # red when an answer about a picture goes on without its client
    with chat(client, user(file((60, 40), 77)), stream=True, max_tokens=300, logprobs=False) as stream:
        next(iter(stream))
    wait_for(lambda: running.server.pump.stats.running == 0, 60)
    assert running.server.pump.stats.pages_used == 0
    wait_for(lambda: running.server.images.room.bytes == running.server.images.kept.bytes, 20)


def test_a_wrong_picture_is_told_to_the_client(client):
    with pytest.raises(openai.BadRequestError, match="declared as 'image/jpeg', but its bytes are image/png") as caught:
        chat(client, user(part(url(RED, "jpeg"))))
    assert caught.value.code == "invalid_image"
