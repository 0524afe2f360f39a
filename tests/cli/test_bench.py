"""``kimi-jax bench`` with the clock taken out: which tests are asked for, and what is made of their times."""

import json

import pytest

from kimi_jax.cli.main import main
from kimi_jax.engine import measure
from kimi_jax.engine.measure import Timing
from kimi_jax.planning import machine
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

SMALL = {
    "num_hidden_layers": 2,
    "full_attention": (2,),
    "hidden_size": 64,
    "num_experts": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), config_json("tiny", **SMALL))


@pytest.fixture
def bench(folder, capsys, monkeypatch):
    asked = []

    def prefill(runner, tokens, repeats):
        asked.append(("prefill", tokens, repeats))
        return Timing(9.0, (0.2, 0.1, 0.3), tokens)

    def decode(runner, rows, context, steps, repeats):
        asked.append(("decode", rows, context, steps, repeats))
        return Timing(9.0, (0.5,) * 3, rows * steps)

    monkeypatch.setattr(machine, "measure_machine", lambda operand: machine.Machine(1e9, 1e10))

    def bench(*words, clock=True):
        if not clock:
            monkeypatch.setattr(measure, "time_prefill", prefill)
            monkeypatch.setattr(measure, "time_decode", decode)
        status = main(["bench", "--model", str(folder), *words])
        return status, *capsys.readouterr(), asked

    return bench


def test_rows_of_json(bench):
    words = ("--json", "--tests", "prefill64, decode1,decode2@100", "--repeats", "3", "--new-tokens", "10")
    status, out, _, asked = bench(*words, clock=False)
    assert status == 0 and out.count("\n") == 1
    assert asked == [("prefill", 64, 3), ("decode", 1, 32, 10, 3), ("decode", 2, 100, 10, 3)]
    rows = json.loads(out)["rows"]
    assert [row["test"] for row in rows] == ["prefill64", "decode1@32", "decode2@100"]
    assert [row["tokens_per_s"] for row in rows] == [320, 20, 40]  # red when the first run counts, or the mean
    for row in rows:
        moved, flops = row["step_bytes"] / 1e9, row["step_flops"] / 1e10
        steps = 1 if row["test"].startswith("prefill") else 10
        bound = max(moved, flops) * steps
        assert row["bound_by"] == ("memory" if moved > flops else "arithmetic")
        assert row["share_of_bound"] == pytest.approx(bound / (0.2 if steps == 1 else 0.5), rel=0.01, abs=1e-4)


def test_a_table_goes_to_stdout(bench):
    status, out, err, _ = bench("--tests", "decode1", clock=False)
    assert status == 0
    assert out.splitlines()[0].split()[:2] == ["test", "tok/s"] and out.splitlines()[1].startswith("decode1@32")
    assert "1.0 GB/s" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tests", "prefill"], "No such test: 'prefill'"),
        (["--tests", "prefill0"], "No such test"),
        (["--tests", "prefill8@4"], "No such test"),
        (["--tests", "decode1,"], "No such test: ''"),
        (["--tests", "decode1;x"], "No such test"),
        (["--repeats", "0"], "must be 1 or more"),
        (["--new-tokens", "0"], "must be 1 or more"),
        (["--tests", "prefill256"], "has 256 tokens and a sequence holds 256"),
        (["--tests", "decode1@200"], "has 266 tokens and a sequence holds 256"),  # red when rows end and cost nothing
    ],
)
def test_what_is_refused(bench, words, said):
    status, out, err, _ = bench(*words)
    assert (status, out) == (2, "")
    assert said in err
