"""The public face with a draft: what a caller sees, and what is refused before anything is loaded."""

import json

import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.cli.main import main
from kimi_jax.completion import DraftUsage
from kimi_jax.draft.config import DraftError
from kimi_jax.engine.request import DraftCounts
from tests.draft import quick_draft
from tests.draft.golden import DRAFTS
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TINY
from tests.parity.quick import folder, quick

pytestmark = pytest.mark.usefixtures("light_compilation")


def test_usage_tells_what_the_draft_did():
    # red when drafts of one request are counted for another, or what was cut off counts
    target, drafted = quick(), quick_draft.runner()
    kimi = Kimi(target.config, target.layout, None, drafted)
    answers = kimi.generate_batch(quick_draft.PROMPTS, 12, ignore_eos=True)
    for answer, plain in zip(answers, quick_draft.plain(), strict=True):
        assert list(answer.token_ids) == plain[:12]
        drafts = answer.usage.drafts
        # the first id comes from the prompt; a step gives what it accepts and one more, but for the last if that is cut
        assert 0 <= 1 + drafts.steps + drafts.accepted - answer.usage.completion_tokens <= 1
        assert drafts.accepted <= drafts.drafted
        assert sum(drafts.by_position) == pytest.approx(drafts.accepted / drafts.steps, abs=1e-3)
    assert answers[0].usage.drafts != answers[1].usage.drafts
    assert target.generate(quick_draft.PROMPTS[0], 2).usage.drafts is None


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


def test_a_comparison_needs_a_draft(capsys):
    # red when a model is measured against itself
    assert main(["bench", "spec", "--model", str(TINY), "--rows", "0"]) == 2
    told = capsys.readouterr().err
    assert "--rows 0" in told
    assert "--draft is missing" in told


@pytest.mark.parametrize("verb", [["bench"], ["bench", "quality", "--against", "float32"]])
def test_verbs_without_drafts_say_so(verb, capsys):
    # red when a measurement of the target alone ignores the draft that it was given
    assert main([*verb, "--model", str(TINY), "--draft", str(DRAFTS / "gqa")]) == 2
    assert "kimi-jax bench spec compares answers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    # red when --draft is dropped on the way, or the counts do not reach --json
    (tmp_path / "ids.json").write_text(json.dumps(quick_draft.PROMPTS[1]))
    (tmp_path / "prompts.json").write_text(json.dumps(quick_draft.PROMPTS[1:2]))
    model = [
        "--model",
        str(folder()),
        "--dtype",
        "float32",
        "--max-seq-len",
        "32",
        "--draft",
        str(quick_draft.folder()),
    ]
    words = ["generate", *model, "--ids", str(tmp_path / "ids.json"), "--max-tokens", "12", "--ignore-eos", "--json"]
    assert main(words) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["token_ids"] == quick_draft.plain()[1][:12]
    assert done["usage"]["drafts"]["drafted"] >= done["usage"]["drafts"]["accepted"]
    words = ["bench", "spec", *model, "--ids", str(tmp_path / "prompts.json"), "--output-len", "12", "--repeats", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_ids"] == 1.0
    assert found["drafts"]["accepted"] == done["usage"]["drafts"]["accepted"]
