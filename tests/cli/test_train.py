"""``kimi-jax train draft``: refusals before a model is loaded, data that the model says, and a draft to go on from."""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed here")

from kimi_jax.cli import main as cli
from kimi_jax.cli import train_draft
from kimi_jax.train.draft_begin import first_weights, new_draft
from kimi_jax.train.draft_export import export_draft
from tests.parity.quick import quick


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_draft.add_parser(parser.add_subparsers())
    return parser.parse_args(["draft", *map(str, words)])


def test_everything_wrong_is_told_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # red when only the first problem is told, or the model, which is not there, is looked for first
    (tmp_path / "training").mkdir()
    words = [
        "train",
        "draft",
        "--model",
        "nowhere",
        "--out",
        str(tmp_path),
        "--init",
        "there",
        "--layers",
        "2",
        "--causal",
    ]
    words += ["--data", "a", "--prompts", "b", "--steps", "0", "--lr", "-1", "--taps", "1,x", "--draft", "c", "--fp8"]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert "8 problems" in told
    for part in (
        "steps = 0",
        "lr = -1",
        "--draft c",
        "--fp8 ptpc",
        "--layers, --taps, --causal",
        "--data and --prompts",
    ):
        assert part in told
    assert "--taps 1,x" in told and "add --resume" in told
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["train", "draft", "--out", str(tmp_path), "--resume"]) == 2
    assert "holds a finished draft already" in capsys.readouterr().err
    assert cli.main(["train"]) == 2
    assert "what works: draft" in capsys.readouterr().err


def test_a_draft_to_go_on_from_is_read_as_masters(tmp_path: Path) -> None:
    # red when another draft's sizes are used, or its values are not the stored ones
    steps = quick().runner.steps
    spec = new_draft(quick().config, "mla", layers=1, block=3, stream="prefix")
    masters = first_weights(spec, quick().runner.params, steps.precision, 4)
    export_draft(tmp_path / "draft", spec, masters)
    read, again = train_draft._begin(parsed("--out", tmp_path / "new", "--init", tmp_path / "draft"), quick())
    assert read == spec and again.keys() == masters.keys()
    for name, array in again.items():
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(array), np.asarray(masters[name].astype(jnp.bfloat16), np.float32))
