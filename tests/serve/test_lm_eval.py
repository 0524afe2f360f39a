"""lm-evaluation-harness with a choice task: it compares log-probabilities of prompt tokens, and tokenizes at the server."""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving
from tests.serve.model import reply, served
from tests.serve.test_completions import WrittenScorer

TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = [("One two", 0), ("The sea keeps", 0), ("A light", 0), ("Rain", 1)]


class Scorer(WrittenScorer):
    """Later tokens are less likely, so that of two choices the shorter is the likelier."""

    def warm(self):
        pass


@pytest.mark.slow
def test_choices(tmp_path):
    pytest.importorskip("lm_eval")
    lines = [{"question": q, "choices": [" a", " no promises at all"], "right": right} for q, right in QUESTIONS]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "task.yaml").write_text(TASK.replace("FILE", str(tmp_path / "test.jsonl")))
    model = dataclasses.replace(served(), scores_prompts=True)
    with serving(FakeEngine(served().vocab, reply("a"), capacity=4096), model=model, scorer=Scorer()) as running:
        words = [
            "--model",
            "local-completions",
            "--tasks",
            "choices",
            "--include_path",
            str(tmp_path),
            "--batch_size",
            "2",
        ]
        words += ["--model_args", f"model=quick,base_url={running.url}/completions,max_retries=1"]
        words += ["--output_path", str(tmp_path / "out.json")]
        done = subprocess.run([sys.executable, "-m", "lm_eval", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Using remote tokenizer" in done.stderr  # red without /tokenizer_info
    (found,) = tmp_path.glob("out*.json")
    assert (
        json.loads(found.read_text())["results"]["choices"]["acc,none"] == 0.75
    )  # red when the scores are off by one place
