"""A server whose model has a draft: the same answers, and what became of the drafts in usage and metrics."""

import dataclasses

import openai
import pytest

import kimi_jax
from kimi_jax.engine.budget import engine_limits
from kimi_jax.engine.request import DraftCounts
from kimi_jax.serve.model import served
from tests.draft import quick_draft
from tests.parity.light import light_compilation as light_compilation
from tests.serve.client import ask, run
from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving
from tests.serve.model import CAPACITY, folder
from tests.serve.model import served as written
from tests.serve.test_real import Unwarmed

COUNTS = DraftCounts(9, (1, 0, 2, 1))
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


class Drafting(FakeEngine):
    """Says of every answer that four steps verified nine drafts and kept seven."""

    def turn(self):
        return [dataclasses.replace(event, drafts=COUNTS) for event in super().turn()]

    def stats(self):
        return dataclasses.replace(super().stats(), drafts=COUNTS)


def test_usage_and_metrics_tell_of_drafts():
    # red when the counts of several answers are not added up, or tokens of one kind are told as the other
    async def scenario(app):
        asked = {"messages": QUESTION, "max_tokens": 4, "n": 2}
        answer = await ask(app, "/v1/chat/completions", asked)
        text = await ask(app, "/v1/completions", {"prompt": "x", "max_tokens": 4})
        return answer.json, text.json, (await ask(app, "/metrics")).body.decode().splitlines()

    answer, text, metrics = run(Drafting(written().vocab, [7] * 9, capacity=CAPACITY), scenario)
    told = {"accepted_prediction_tokens": 14, "rejected_prediction_tokens": 4}
    assert answer["usage"]["completion_tokens_details"].items() >= told.items()
    told = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}
    assert text["usage"]["completion_tokens_details"] == told
    totals = {"draft_steps": 4, "drafted_tokens": 9, "accepted_tokens": 7}
    positions = {
        f'accepted_tokens_by_position_total{{position="{place}"}}': kept for place, kept in ((1, 3), (2, 3), (3, 1))
    }
    for name, value in ({f"{name}_total": value for name, value in totals.items()} | positions).items():
        assert f"kimi_jax_{name} {value:.1f}" in metrics


@pytest.mark.slow
@pytest.mark.usefixtures("light_compilation")
def test_a_client_gets_the_text_of_a_server_without_a_draft():
    # red when a draft changes an answer or a count of tokens
    kimi = kimi_jax.load(folder(), draft=quick_draft.folder(), dtype="float32", prefill_chunk=16, decode_block=4)
    runner = kimi.runner
    limits = engine_limits(runner.steps, slots=4, chunk=16)
    engine = Unwarmed.build(runner.steps, runner.params, runner.allowed, limits)
    with (
        serving(engine, model=served(kimi, engine, ["quick"])) as running,
        openai.OpenAI(base_url=running.url, api_key="x", max_retries=0, timeout=300) as client,
    ):

        def ask(**fields):
            named = {
                "model": "quick",
                "prompt": "One two three four",
                "max_tokens": 40,
                "temperature": 0,
                "seed": 0,
                **fields,
            }
            done = client.completions.create(**named)
            return done.choices[0].text, done.choices[0].finish_reason, done.usage

        # what min_p asks for is drawn id by id, as without a draft
        plain, drafted = ask(extra_body={"min_p": 1e-6}), ask()
        assert plain[:2] == drafted[:2]
        assert plain[2].completion_tokens == drafted[2].completion_tokens > 20
        assert plain[2].completion_tokens_details is None
        assert drafted[2].completion_tokens_details.rejected_prediction_tokens > 0
        kept = running.server.pump.stats.drafts
        assert kept.verified > 0
