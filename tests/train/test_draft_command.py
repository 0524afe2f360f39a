"""``kimi-jax train draft`` from end to end: answers of the target, updates, an exported draft that loads."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed here")

from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.cli import main as cli
from kimi_jax.draft.config_read import load_spec
from kimi_jax.precision import choose_precision
from kimi_jax.train.draft_begin import first_weights
from kimi_jax.train.draft_data import read_samples
from tests.parity.quick import SIZES, folder


@pytest.mark.slow
def test_a_few_updates_move_all_of_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # red when a loss does not reach a part of the draft, answers share a seed, or the target is written to
    out, target = tmp_path / "draft", folder()
    before = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
    sizes = "--steps 4 --sample 8 --batch 4 --seq-len 24 --anchors 4 --layers 1 --block 4 --lr 4e-3 --markov-rank 8"
    words = ["train", "draft", "--model", str(target), "--out", str(out), *sizes.split(), "--prefill-chunk", "16"]
    assert cli.main([*words, "--dtype", "float32", "--export-dtype", "float32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sequences"] == 8 and told["tokens"] == 8 * 24 and told["resumed_at"] is None
    samples = read_samples(out / "training" / "data.jsonl", SIZES["vocab_size"], None)
    assert len({sample.ids for sample in samples}) == 8  # every answer has a seed of its own
    spec = load_spec(out)
    with CheckpointFolder.open(out) as trained, CheckpointFolder.open(target) as taught:
        last = {"model.norm.weight": taught.read("language_model.model.norm.weight")}
        first = first_weights(spec, last, choose_precision("float32"), 0)
        still = [name for name, array in first.items() if np.array_equal(trained.read(name), np.asarray(array))]
    assert not still
    assert before == {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
