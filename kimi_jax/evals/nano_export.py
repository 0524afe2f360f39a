"""kimi-nano's word problems as a task of lm-evaluation-harness: a YAML file and two of questions, in the form of GSM8K."""

import json
from pathlib import Path
from typing import Any

from kimi_jax.train.data.example import Split
from kimi_jax.train.data.tasks import mixture

NAME = "kimi_nano_math"
WEIGHTS = {"one-step": 1.0, "two-step": 2.0, "three-step": 1.0}
FEWSHOT = 64
"""Worked examples from the training half, for who asks with some."""


def export(folder: str | Path, rows: int, seed: int) -> Path:
    """Writes ``kimi_nano_math.yaml``, ``test.jsonl`` of held-out questions and ``train.jsonl``, and returns the first.

    The YAML file names the other two by their full paths: a moved folder is exported again.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    halves: tuple[tuple[str, Split, int], ...] = (("train", "train", FEWSHOT), ("test", "held-out", rows))
    for name, split, count in halves:
        files[name] = folder.resolve() / f"{name}.jsonl"
        files[name].write_text(
            "".join(json.dumps(row) + "\n" for row in questions(split, count, seed)), encoding="utf-8"
        )
    made = folder / f"{NAME}.yaml"
    made.write_text(json.dumps(definition({name: str(path) for name, path in files.items()}), indent=1) + "\n")
    return made


def questions(split: Split, rows: int, seed: int) -> list[dict[str, str]]:
    """Questions with worked answers that end in ``#### NUMBER``."""
    stream = mixture(WEIGHTS, seed, split, (True, "max"))
    examples = [stream(at) for at in range(rows)]
    return [
        {
            "question": one.prompt[0]["content"],
            "answer": f"{one.reply['reasoning_content']}\n{one.reply['content']}\n#### {one.answer}",
        }
        for one in examples
    ]


def definition(files: dict[str, str]) -> dict[str, Any]:
    """The task as the harness reads it; JSON is YAML."""
    return {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "output_type": "generate_until",
        "test_split": "test",
        "fewshot_split": "train",
        "num_fewshot": 0,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 512},
        "filter_list": [
            _extract("strict-match", r"The answer is (-?[0-9]+)", 0),
            _extract("flexible-extract", r"(-?[0-9]+)", -1),
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def _extract(name: str, pattern: str, which: int) -> dict[str, Any]:
    regex = {"function": "regex", "regex_pattern": pattern, "group_select": which}
    return {"name": name, "filter": [regex, {"function": "take_first"}]}
