"""GSM8K, or a task of its form, by lm-evaluation-harness in a process of its own: a real client with its own sums."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.problems import ProblemsError

TASK = "gsm8k"
SPLITS = ("train", "test")
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Ending of a data file -> the reader for it."""

HARNESSES = {"completions": "local-completions", "chat": "local-chat-completions"}
"""Endpoint of the server -> the harness's model for it."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class HarnessFailed(RuntimeError):
    """The harness ended without results; what it said stands above."""


@dataclass(frozen=True)
class Run:
    """One evaluation.

    Attributes:
      url: of the server, without ``/v1``.
      model: name that the server knows.
      endpoint: "completions" or "chat".
      concurrency: requests at once.
      fewshot: worked examples before each question.
      max_tokens: of one answer.
      limit: questions, or None for all.
      data: folder or None for the public data set from the network.
      key: of the server, or None.
      samples: file for the harness's results with all prompts and answers, or None.
      task: definition of a task with the filters and the metric of GSM8K to run in its place, or None.
    """

    url: str
    model: str
    endpoint: str = "completions"
    concurrency: int = 8
    fewshot: int = 5
    max_tokens: int = 512
    limit: int | None = None
    data: Path | None = None
    key: str | None = None
    samples: Path | None = None
    task: Path | None = None


@dataclass(frozen=True)
class Score:
    """What the harness found: shares of right answers, their standard errors, and how many questions were asked."""

    strict: float
    strict_error: float | None
    flexible: float
    flexible_error: float | None
    questions: int


def gsm8k(run: Run) -> Score:
    """Runs the harness; its progress goes to stderr.

    Raises:
      ProblemsError: it is not installed, or the data is not there.
      HarnessFailed: it broke off.
    """
    installed = importlib.util.find_spec("lm_eval")
    if installed is None or installed.origin is None:
        raise ProblemsError(
            "GSM8K cannot be run", ["lm-evaluation-harness is not installed"], "pip install 'kimi-jax[eval]'"
        )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        task = folder / f"{TASK}_here.yaml"
        definition = run.task or Path(installed.origin).parent / "tasks" / TASK / f"{TASK}.yaml"
        if run.task is not None and not run.task.is_file():
            problems = [f"there is no file {run.task}"]
            raise ProblemsError(
                "This task cannot be run", problems, "kimi-jax eval nano --export-lm-eval FOLDER makes one."
            )
        task.write_text(json.dumps(_task(definition.resolve(), run.data)))  # JSON is YAML
        output = folder / "results.json"
        asked = {"evaluate": _arguments(run, task), "output": str(output)}
        done = subprocess.run(
            [sys.executable, "-m", "kimi_jax.evals.harness_process"],
            input=json.dumps(asked).encode(),
            env=_environment(run, folder),
            stdout=2,  # its progress and tables: stdout is ours
        )
        if done.returncode or not output.exists():
            hint = "" if run.data else "; where there is no network, give the data set with --data FOLDER"
            raise HarnessFailed(f"lm-evaluation-harness ended with status {done.returncode}{hint}")
        if run.samples is not None:
            run.samples.write_bytes(output.read_bytes())
        return _score(json.loads(output.read_text()))


def _task(definition: Path, data: Path | None) -> dict[str, Any]:
    """The harness's own task, with the data from a folder where there is one."""
    task: dict[str, Any] = {"include": str(definition), "task": f"{TASK}_here"}
    if data is None:
        return task
    files = {split: _file(data, split) for split in SPLITS}
    kinds = {FORMATS[file.suffix] for file in files.values() if file is not None}
    problems = [
        f"{data} has no file named {split}*.jsonl, .json or .parquet" for split in SPLITS if files[split] is None
    ]
    if len(kinds) > 1:
        problems.append(f"{data} mixes {' and '.join(sorted(kinds))} files")
    if problems:
        raise ProblemsError("The data set cannot be read", problems, "The public one has a train and a test file.")
    return {
        **task,
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
    }


def _file(folder: Path, split: str) -> Path | None:
    found = sorted(path for path in folder.rglob(f"{split}*") if path.suffix in FORMATS and path.is_file())
    return found[0].resolve() if found else None


def _arguments(run: Run, task: Path) -> dict[str, Any]:
    """Arguments of the harness's ``simple_evaluate``."""
    return {
        "model": HARNESSES[run.endpoint],
        "model_args": {
            "model": run.model,
            "base_url": run.url + PATHS[run.endpoint],
            "num_concurrent": run.concurrency,
            "tokenizer_backend": "none",  # prompts go as text: the server has the tokenizer
            "max_retries": 3,
            "timeout": 3600,
        },
        "tasks": [str(task)],
        "num_fewshot": run.fewshot,
        "limit": run.limit,
        "gen_kwargs": {"max_gen_toks": run.max_tokens},
        "apply_chat_template": run.endpoint == "chat",
        "fewshot_as_multiturn": run.endpoint == "chat",
        "log_samples": run.samples is not None,
    }


def _environment(run: Run, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "OPENAI_API_KEY": run.key or "none"}  # not an argument, which others could see
    if run.data is not None or run.task is not None:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "data")}
    return environment


def _score(found: dict[str, Any]) -> Score:
    scores = found["results"][f"{TASK}_here"]

    def number(name: str) -> float | None:
        value = scores.get(name)
        return float(value) if isinstance(value, int | float) else None

    strict, flexible = number("exact_match,strict-match"), number("exact_match,flexible-extract")
    if strict is None or flexible is None:
        raise HarnessFailed(f"the harness reported no exact_match: {sorted(scores)}")
    return Score(
        strict,
        number("exact_match_stderr,strict-match"),
        flexible,
        number("exact_match_stderr,flexible-extract"),
        int(found["n-samples"][f"{TASK}_here"]["effective"]),
    )
