"""The exported task of kimi-nano: lm-evaluation-harness itself, against our server."""

import json

import pytest

from kimi_jax.cli.main import main
from kimi_jax.evals.harness import Run, gsm8k
from kimi_jax.evals.nano_export import questions
from kimi_jax.problems import ProblemsError
from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving
from tests.serve.model import reply, served
from tests.serve.model import tokenizer as served_tokenizer


def nano_reply(request):
    """The ids with which a model answers a prompt: right, but for one question that it does not know."""
    known = {row["question"]: row["answer"] for row in questions("held-out", 4, 0)}
    prompt = served_tokenizer().decode(request.ids)
    asked = next(at for at, question in enumerate(known) if question in prompt)
    said = list(known.values())[asked].partition("\n#### ")[0].splitlines()[-1] if asked else "I do not know."
    return reply(f"Hm.<|close|>think<|sep|><|open|>response<|sep|>{said}<|close|>response<|sep|><|end_of_msg|>")


@pytest.fixture(scope="module")  # so that it begins before a test's capfd, whose stderr absl would take for its own
def server():
    with serving(FakeEngine(served().vocab, nano_reply, capacity=1 << 16)) as running:
        yield running.url


@pytest.mark.slow
def test_the_harness_runs_the_export_against_a_server(server, tmp_path, capfd):
    pytest.importorskip("lm_eval", reason="pip install 'kimi-jax[eval]'")
    assert main(["eval", "nano", "--export-lm-eval", str(tmp_path), "--rows", "4", "--json"]) == 0
    made = json.loads(capfd.readouterr().out)["exported"]
    words = ["--task", made, "--endpoint", "chat", "--samples", str(tmp_path / "kept"), "--json"]
    assert main(["eval", "gsm8k", "--url", server, *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["questions"], found["fewshot"]) == (4, 0)
    # Red when a pattern does not find what is taught, or a target is not the number alone.
    assert (found["strict"], found["flexible"]) == (0.75, 0.75)
    sample = json.loads((tmp_path / "kept").read_text())["samples"]["gsm8k_here"][0]
    assert sample["doc"]["question"] == questions("held-out", 1, 0)[0]["question"]


def test_a_task_that_is_not_there_is_refused(tmp_path):
    pytest.importorskip("lm_eval", reason="pip install 'kimi-jax[eval]'")
    with pytest.raises(ProblemsError, match="--export-lm-eval"):
        gsm8k(Run("http://127.0.0.1:1", "m", task=tmp_path / "none.yaml"))
