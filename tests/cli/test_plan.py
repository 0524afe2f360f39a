"""``kimi-jax plan``: one JSON object, one message, a figure, and what the words mean."""

import json
import sys

import pytest

import kimi_jax
from kimi_jax.cli.main import main
from kimi_jax.planning import report


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    return (status, *capsys.readouterr())


def test_json_is_one_object_and_nothing_else(capsys):
    # Red when a note or a path goes to stdout.
    status, out, err = run(capsys, "random-tiny", "--device", "cpu", "--layout", "single", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["config"] == "random-tiny" and found["fit"]["fits"] is None
    assert found["calls"][0]["lower_ms"] is None


def test_every_key_is_documented():
    # Red when a key is added without a word about it.

    def keys(value) -> set[str]:
        if isinstance(value, list):
            return {key for item in value for key in keys(item)}
        if not isinstance(value, dict):
            return set()
        return set(value) | {key for item in value.values() for key in keys(item)}

    told = report.__doc__ or ""
    shown = kimi_jax.plan("k3.1-pro", "tp8", batch=9, goal="latency").to_json()
    data = {"flops", "mesh", "axes", "cache", "rows"}  # their keys are names of other things
    fixed = keys({key: value for key, value in shown.items() if key not in ("layout", "weights", "state", "calls")})
    for call in shown["calls"]:
        fixed |= keys({key: value for key, value in call.items() if key not in data})
    fixed -= {"bf16", "fp32"}
    for row in (*shown["weights"]["rows"].values(), *shown["state"]["rows"].values(), shown["state"]["total"]):
        fixed |= set(row)
    assert {key for key in fixed if f"``{key}``" not in told} == set()


def test_a_readable_table(capsys):
    # Red when the text is not printed, or the shortcut for a layout is not understood.
    status, out, _ = run(capsys, "random-tiny", "--device", "mi355x", "-tp", "4", "--context", "128")
    assert status == 0
    assert out.startswith("random-tiny on tp4: 4 x mi355x, 1 sequence of 128 tokens")
    assert "Fits: yes." in out and "MB = 1,000,000 bytes" in out


def test_a_model_folder_is_a_configuration(capsys, k3_tiny):
    # Red when only names are read.
    status, out, _ = run(capsys, str(k3_tiny), "--device", "cpu", "--layout", "single", "--json")
    assert status == 0 and json.loads(out)["parameters"]["total"] > 0


def test_what_does_not_fit_is_an_answer(capsys):
    # Red when an ask that is too large counts as a wrong request.
    status, out, _ = run(capsys, "k3", "--layout", "single", "--context", "1024", "--json")
    found = json.loads(out)
    assert status == 0 and found["fit"]["fits"] is False
    assert found["fit"]["smallest"] == found["fit"]["tried"][-1]


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["k9"], "No configuration at k9"),
        (["random-tiny", "--layout", "tp9"], 'did you mean "tp8"'),
        (["random-tiny", "--device", "mi355"], 'did you mean "mi355x"'),
        (["random-tiny", "--layout", "tp8", "-tp", "4"], "Two placements are given"),
        (["random-tiny", "-tp", "7"], "Sizes that work for tensor"),
        (["random-tiny", "--batch", "0"], "batch = 0"),
        (["random-tiny", "--search", "beauty"], "invalid choice"),
    ],
)
def test_wrong_requests(capsys, words, piece):
    # Red when a refusal is a traceback, or goes to stdout.
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "") and piece in err


def test_a_figure(capsys, tmp_path):
    # Red when the bars are not drawn, or the path is printed into the JSON.
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    status, out, err = run(
        capsys, "random-tiny", "--context", "64", "--search", "latency", "--figure", str(path), "--json"
    )
    assert status == 0 and json.loads(out)["search"]["goal"] == "latency"
    assert str(path) in err and path.stat().st_size > 2000


def test_a_figure_without_matplotlib_says_what_to_install(capsys, tmp_path, monkeypatch):
    # Red when a missing extra is a failure of the work.
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "random-tiny", "--context", "64", "--figure", str(tmp_path / "x.png"))
    assert (status, out) == (2, "") and 'pip install "kimi-jax[notebooks]"' in err
    assert not (tmp_path / "x.png").exists()


def test_a_figure_that_cannot_be_written(capsys, tmp_path):
    # Red when a wrong ending or folder is a traceback.
    pytest.importorskip("matplotlib")
    status, out, err = run(capsys, "random-tiny", "--context", "64", "--figure", str(tmp_path / "no" / "x.png"))
    assert (status, out) == (2, "") and "cannot be written" in err
