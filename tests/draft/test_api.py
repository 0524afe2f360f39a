"""The public face with a draft: what a caller sees, and what is refused before anything is loaded."""

import json

import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.cli.main import main
from kimi_jax.completion import DraftUsage
from kimi_jax.draft.attach import DraftOptions
from kimi_jax.draft.config import DraftError
from kimi_jax.engine.request import DraftCounts
from tests.draft.golden import DRAFTS, case
from tests.draft.models import plain, runner
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TINY
from tests.parity.quick import folder

pytestmark = pytest.mark.usefixtures("light_compilation")


def prompts():
    return [case("gqa", f"case{i}")["ids"].tolist() for i in range(4)]


def test_usage_tells_what_the_draft_did():
    # red when drafts of one request are counted for another, or what was cut off counts
    target = plain()
    kimi = Kimi(target.config, target.layout, None, runner("gqa"))
    answers = kimi.generate_batch(prompts(), 18, ignore_eos=True)
    assert list(answers[0].token_ids) == case("gqa", "loop_greedy")["output"].tolist()
    drafts = answers[0].usage.drafts
    assert (drafts.steps, drafts.drafted, drafts.accepted) == (5, 7 + 7 + 3 + 1 + 0, 12)
    assert drafts.mean_length == 1 + 12 / 5
    assert drafts.by_position == (0.6, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2)
    for answer in answers:
        assert answer.usage.completion_tokens == 1 + answer.usage.drafts.steps + answer.usage.drafts.accepted


def test_no_step_no_shares():
    # red when a division by no steps fails an answer of one id
    assert DraftUsage.of(DraftCounts(0, (0,) * 8)) == DraftUsage(0, 0, 0, 0.0, (0.0,) * 7)


def test_a_draft_of_another_model_is_refused():
    # red when a draft is run beside a target of other widths or fewer layers
    with pytest.raises(DraftError) as caught:
        kimi_jax.load(folder(), dtype="float32", max_seq_len=32, draft=DRAFTS / "gqa")
    assert "hidden_size = 64, but the target has 48" in str(caught.value)
    assert "taps layers [2, 4, 5, 10, 12]; the target has layers 0 to 1" in str(caught.value)
    with pytest.raises(kimi_jax.api.LoadError, match="give its path or DraftOptions"):
        kimi_jax.load(folder(), draft=3)


@pytest.mark.parametrize("verb", ["serve", "bench"])
def test_verbs_without_drafts_say_so(verb, capsys):
    # red when a server starts and ignores its draft
    assert main([verb, "--model", str(TINY), "--draft", str(DRAFTS / "gqa")]) == 2
    assert "kimi-jax generate and kimi-jax chat speculate" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    # red when --draft is dropped on the way, or the counts do not reach --json
    (tmp_path / "ids.json").write_text(json.dumps(prompts()[0]))
    arguments = ["generate", "--model", str(TINY), "--ids", str(tmp_path / "ids.json"), "--dtype", "float32"]
    arguments += ["--max-tokens", "18", "--ignore-eos", "--max-seq-len", "64", "--json", "--draft", str(DRAFTS / "gqa")]
    assert main(arguments) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["token_ids"] == case("gqa", "loop_greedy")["output"].tolist()
    assert done["usage"]["drafts"]["accepted"] == 12


@pytest.mark.slow
def test_a_temperature_is_reproducible_and_sharding_changes_nothing():
    # red when draws depend on the batch or on the devices
    options = {
        "dtype": "float32",
        "max_seq_len": 64,
        "prefill_chunk": 16,
        "draft": DraftOptions(DRAFTS / "mla", rule="token"),
    }
    answers = []
    for layout in ("single", "tp8"):
        kimi = kimi_jax.load(TINY, layout, **options)
        answers.append(kimi.generate(prompts()[1], 12, temperature=0.9, top_p=0.9, seed=5).token_ids)
        pair = kimi.generate_batch(prompts()[:2], 12, temperature=0.9, top_p=0.9, seed=5)
        assert pair[1].token_ids == answers[-1]
    assert answers[0] == answers[1]
