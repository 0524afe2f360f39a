"""``kimi-jax bench quality``: the distance of forms of one small model, and what is refused before anything is loaded."""

import json

import numpy as np
import pytest

from kimi_jax.cli.main import main
from kimi_jax.evals.quality import Seen, distance
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

SMALL = {"num_hidden_layers": 2, "full_attention": (2,), "hidden_size": 64, "num_experts": 4, "vocab_size": 512}


def test_distances_are_those_of_a_hand():
    # Red when the two sides of the divergence swap, ties count twice, or a layer's error is of another's size.
    reference = Seen(np.log(np.float32([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])), np.ones((2, 2, 4), np.float32))
    logits = np.log(np.float32([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])) + 3
    layers = reference.layers * np.float32([1.0, 1.5])[None, :, None]
    found = distance(Seen(logits, layers), reference)
    assert found.tokens == 2 and found.top1_agreement == 0.5
    assert found.kl_max == pytest.approx(0.5 * np.log(2) + 0.25 * np.log(0.5), rel=1e-5)
    assert found.kl_mean == pytest.approx(found.kl_max / 2, rel=1e-5)
    assert found.layer_errors == pytest.approx((0.0, 0.5))
    swapped = distance(reference, Seen(logits, layers))
    assert swapped.layer_errors == pytest.approx((0.0, 1 / 3))


@pytest.mark.slow
def test_one_run_compares_with_both_references(tmp_path, capsys):
    # Red when FP8 does not reach the tested form, a reference is quantised too, or forms see different prompts.
    folder = write_random_checkpoint(tmp_path / "model", config_json("tiny", **SMALL))
    common = ["bench", "quality", "--model", str(folder), "--prompts", "2", "--length", "9", "--json"]
    assert main([*common, "--fp8", "ptpc", "--kv-dtype", "fp8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tested"] == {"dtype": "bfloat16", "kv_dtype": "fp8", "fp8": "ptpc", "experts": None}
    rows = {(row["form"], row["against"]): row for row in found["rows"]}
    assert rows.keys() == {("tested", "bfloat16"), ("tested", "float32"), ("bfloat16", "float32")}
    tested, yardstick = rows["tested", "float32"], rows["bfloat16", "float32"]
    assert tested["tokens"] == 18 and len(tested["layer_errors"]) == 2
    # weights rounded to 4 bits beside activations rounded to 8
    assert 0.01 < tested["layer_errors"][0] < 0.2 and yardstick["layer_errors"][0] < 0.01
    assert 0 < yardstick["kl_mean"] < tested["kl_mean"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--against", "float16"], "'float16' is no form"),
        (["--against", "bfloat16"], "the model as asked is the form"),
        (["--fp8", "ptpc", "--length", "1"], "--length from 2"),
    ],
)
def test_requests_that_cannot_be_measured(options, said, capsys):
    # Red when a model is loaded first.
    assert main(["bench", "quality", "--model", "/nowhere", *options]) == 2
    assert said in capsys.readouterr().err
