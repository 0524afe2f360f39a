"""``kimi-jax eval nano``: what it asks, how it reads and scores answers, and the task that it exports."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from kimi_jax.cli import eval_nano
from kimi_jax.cli.main import main
from kimi_jax.completion import Completion, DraftUsage, Usage
from kimi_jax.evals.nano import NanoError, askable, evaluate
from kimi_jax.evals.nano_export import questions
from kimi_jax.testing.tokenizer import write_tiny_tokenizer
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train.data.drawing import picture
from kimi_jax.train.data.encode import encode, prompt_ids
from kimi_jax.train.data.tasks import PICTURES, TASKS, example

ROWS = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@cache
def known(tokenizer):
    """(ids of a prompt, its pictures) -> ids of the right answer."""
    answers = {}
    for name in TASKS:
        for at in range(ROWS):
            one = example(name, "held-out", 0, at, (True, "max"))
            prompt = prompt_ids(one, tokenizer)
            seen = tuple(picture(pixels).digest for pixels in one.images)
            answers[tuple(prompt), seen] = encode(one, tokenizer).ids[len(prompt) :].tolist()
    return answers


class Scripted:
    """A model that knows the answers, and says something else to some prompts."""

    def __init__(self, tokenizer, wrong=lambda ids: ids):
        self.tokenizer, self.vision, self.no_vision = tokenizer, object(), ""
        self.config = SimpleNamespace(name="scripted", media_placeholder=None)
        self.known, self.batches, self.wrong = known(tokenizer), [], wrong

    def generate_batch(self, prompts, max_tokens, images=()):
        self.batches.append(len(prompts))
        seen = [tuple(one.digest for one in some) for some in images or [()] * len(prompts)]
        asked = zip(prompts, seen, strict=True)
        return [self._completion(self.wrong(self.known[tuple(prompt), some]), max_tokens) for prompt, some in asked]

    def _completion(self, ids, most):
        usage = Usage(1, len(ids), drafts=DraftUsage(4, 4, 6, 2.5, ()))
        return Completion("", tuple(ids[:most]), "stop" if len(ids) <= most else "length", usage=usage)


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_knows_everything_scores_it_all(name, tokenizer):
    model = Scripted(tokenizer)
    row, answered = evaluate(model, name, ROWS, 0, batch=2)
    assert (row.rows, row.right, row.cut, row.draft_length) == (ROWS, 1.0, 0.0, 2.5)
    assert row.valid == (1.0 if name in ("call", "parallel-calls") else None)
    assert model.batches == [2, 2, 2]  # red when the last batch has a size of its own, which compiles again
    assert row.prompt_tokens == np.mean([one.prompt_tokens for one in answered])


def test_wrong_and_cut_answers_are_counted(tokenizer):
    close = tokenizer.special_id("<|close|>")

    def forgetful(ids):  # ends inside its thoughts
        return [*ids[: ids.index(close)], ids[-1]]

    row, _ = evaluate(Scripted(tokenizer, forgetful), "two-step", ROWS, 0)
    assert row.right == 0.0  # red when thoughts count as the answer
    row, _ = evaluate(Scripted(tokenizer), "two-step", ROWS, 0, max_tokens=5)
    assert (row.right, row.cut) == (0.0, 1.0)

    model = Scripted(tokenizer)
    replies = list(model.known.values())
    model.wrong = lambda ids: replies[replies.index(ids) - 1]  # the answer to another question
    row, _ = evaluate(model, "call", ROWS, 0)
    assert row.right == 0.0 and row.valid < 1.0  # red when arguments are not compared


def test_what_a_model_lacks_is_said(tokenizer):
    model = Scripted(tokenizer)
    assert askable(model, list(TASKS), named=False) == (list(TASKS), [])
    model.vision, model.no_vision = None, "the folder has no tower"
    names, notes = askable(model, list(TASKS), named=False)
    assert set(TASKS) - set(names) == PICTURES and "no tower" in notes[0]
    with pytest.raises(NanoError, match=r"word.*\n.*no tower"):
        askable(model, ["sum", "word"], named=True)
    model.tokenizer = None
    with pytest.raises(NanoError, match="no tokenizer files"):
        askable(model, ["sum"], named=False)


def test_the_command_prints_one_row_a_task(tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(eval_nano, "load_model", lambda args: Scripted(tokenizer))
    words = ["eval", "nano", "--tasks", "two-step,word", "--rows", str(ROWS)]
    assert main(words) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [[name, "5", "100.0%"] for name in ("two-step", "word")]
    assert head.split()[2] == "right"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["task"] for row in found["tasks"]] == ["two-step", "word"]
    assert (found["thinking"], found["effort"], found["left_out"]) == (True, "max", [])
    assert main(["eval", "nano", "--tasks", "two-stepp"]) == 2
    assert "two-step" in capsys.readouterr().err
    assert main(["eval", "nano", "--rows", "0", "--batch", "0"]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_exported_questions_are_held_out():
    rows = questions("held-out", 40, 0)
    assert not {row["question"] for row in rows} & {row["question"] for row in questions("train", 400, 0)}
    for row in rows:
        said, _, number = row["answer"].partition("\n#### ")
        assert f"The answer is {number}" in said  # red when the harness would look for another number
