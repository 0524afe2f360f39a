"""The verb ``compile`` on fake devices of this machine, and without any compiler."""

import argparse
import json

import pytest

from kimi_jax.cli import compile as verb
from kimi_jax.cli.model_args import ArgumentError
from kimi_jax.placement.layout import LayoutError
from kimi_jax.placement.lowered import Launch
from kimi_jax.placement.rocm.problem import TargetError
from kimi_jax.planning import compile as compiling
from kimi_jax.planning import lower
from kimi_jax.testing.configs import config_json


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """Two layers, one of each kind."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config_json("tiny", num_hidden_layers=2, full_attention=(2,))))
    return str(path)


def run(capsys, *words: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    status = verb.run(parser.parse_args(["compile", *words]))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_json_has_the_documented_keys_and_nothing_else_is_printed(capsys, config):
    # Red when a progress line goes to stdout, or a key is renamed.
    status, out, err = run(capsys, config, "--target", "cpu", "--context", "128", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found.keys() == {
        "config", "layout", "target", "devices", "phase", "draft", "batch", "context", "tokens", "jax", "implementations",
        "seconds", "peak_bytes",
        "memory", "plan", "collectives", "launches", "moved", "copies", "weight_readers", "kernels", "budget",
    }  # fmt: skip
    assert (found["layout"], found["devices"], found["phase"]) == ("tp8", 8, "decode")
    assert found["plan"]["agrees"]
    assert found["memory"]["aliased"] == found["plan"]["cache"]


@pytest.mark.slow
def test_a_broken_budget_is_a_failure(capsys, tmp_path, config):
    # Red when the exit status does not say that the budget is broken.
    budget = tmp_path / "none.toml"
    budget.write_text("temp_bytes = 0\n")
    words = (config, "--target", "cpu", "--context", "128", "--budget", str(budget))
    status, out, err = run(capsys, *words)
    assert status == 1
    assert "over budget: temp_bytes" in out
    assert "moe: all-reduce" in err


def test_an_unknown_layout_is_refused(capsys, config):
    # Red when the layout is not looked up before the model is built.
    with pytest.raises(LayoutError, match='did you mean "tp8"'):
        run(capsys, config, "--target", "cpu", "--layout", "tp88")


def test_a_target_that_cannot_be_had_names_what_works(capsys, config):
    # Red when the reason goes without either way out.
    with pytest.raises(TargetError, match=r"--lower holds the program.*--target cpu compiles the same step"):
        run(capsys, config, "--target", "h200", "--context", "128")


def no_compiler(monkeypatch, reason: str) -> None:
    """The ROCm compiler cannot be had, and asking for it says why."""

    def refuse(*_args):
        raise TargetError("No ROCm compiler here", [reason])

    monkeypatch.setattr(compiling, "compile_only_devices", refuse)


@pytest.mark.parametrize(
    "reason", ["gcc is not installed", "pip cannot fetch jax-rocm7-pjrt", "this is darwin on arm64"]
)
def test_a_compiler_that_cannot_be_had_names_what_works(capsys, monkeypatch, config, reason):
    # Red when only a wrong platform says the ways out.
    no_compiler(monkeypatch, reason)
    with pytest.raises(TargetError, match=rf"(?s){reason}.*--lower.*--target cpu"):
        run(capsys, config, "--context", "128")


def test_lowering_needs_no_compiler_and_its_json_has_the_documented_keys(capsys, monkeypatch, config):
    # Red when --lower asks for the plugin, prints a progress line to stdout, or renames a key.
    no_compiler(monkeypatch, "the plugin was asked for")
    status, out, err = run(capsys, config, "--lower", "--context", "128", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found.keys() == {
        "config", "layout", "target", "devices", "phase", "draft", "batch", "context", "tokens", "jax", "implementations",
        "evidence", "seconds", "peak_bytes", "arguments", "plan", "kernels", "collectives",
    }  # fmt: skip
    assert found["plan"]["agrees"]
    assert (found["arguments"]["parameters"], found["arguments"]["donated"]) == (
        found["plan"]["weights"],
        found["plan"]["cache"],
    )
    assert {"op": "kda", "name": "kda_step", "calls": 1} in found["kernels"]


def test_a_lowered_step_that_breaks_its_plan_is_a_failure(capsys, monkeypatch, config):
    # Red when the exit status does not say so.
    monkeypatch.setattr(lower, "expected_kernels", lambda *_args: {Launch("kda", "kda_step"): 2})
    status, out, err = run(capsys, config, "--lower", "--context", "128")
    assert status == 1
    assert "wrong: kda calls kda_step 1 time" in out
    assert "kda calls kda_step 1 time" in err


def test_lowering_has_no_budget(capsys, config):
    # Red when a budget is silently not held.
    with pytest.raises(ArgumentError, match="--lower and --budget k3-tp8-decode-1"):
        run(capsys, config, "--lower", "--budget", "k3-tp8-decode-1")
