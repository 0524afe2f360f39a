"""``kimi-jax doctor`` on this machine: one JSON object or readable lines, and an exit status that means something."""

import json
import re
from functools import partial

import pytest

from kimi_jax.cli import doctor
from kimi_jax.cli.main import main
from kimi_jax.doctor import machine
from kimi_jax.doctor.machine import Started


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch, tmp_path):
    """A machine without GPUs, wherever the test runs; JAX is not started again in another process for every test."""
    monkeypatch.setattr(machine, "start_jax", lambda *_: Started("cpu", ("cpu",), (None,)))
    monkeypatch.setattr(machine, "gather", partial(machine.gather, root=tmp_path))


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["doctor", *words])
    return (status, *capsys.readouterr())


def test_a_cpu_is_ready_for_the_default_model(capsys):
    status, out, _ = run(capsys, "--platform", "cpu")
    assert status == 0, out
    assert "Ready for random-tiny on single, cpu." in out and "kimi-jax plan k3" in out
    assert all(re.match(r"(ok|missing|wrong) ", line) for line in out.split("\n\n")[0].splitlines())


def test_json_is_one_documented_object(capsys):
    status, out, err = run(capsys, "--platform", "rocm", "--json")
    found = json.loads(out)
    assert (status, err, found["ready"]) == (1, "", False)  # red when a missing GPU is not a failure
    told = doctor.__doc__ or ""
    assert {key for key in (*found, *found["findings"][0]) if f"``{key}``" not in told} == set()
    assert (found["model"], found["layout"]) == ("k3", "tp8")
    states = {each["name"]: each["state"] for each in found["findings"]}
    assert states["/dev/dri"] == "missing" and states["jax"] == "ok"


def test_a_folder_that_is_not_there_is_asked_for_room(capsys, tmp_path):
    _, out, _ = run(capsys, "--platform", "cpu", "--layout", "tp8", "--model", str(tmp_path / "K3"), "--json")
    found = json.loads(out)
    (disk,) = [each for each in found["findings"] if each["name"] == "disk"]
    assert found["model"] == "k3" and "of 1.56 TB of weights are there" in disk["found"]


def test_a_folder_that_is_there_is_looked_at(capsys, k3_tiny):
    status, out, _ = run(capsys, "--platform", "cpu", "--model", str(k3_tiny))
    assert status == 0 and "weights are there" in out


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["--layout", "tp9"], 'did you mean "tp8"'),
        (["--context", "0"], "--context 0"),
        (["--platform", "tpu"], "invalid choice"),
    ],
)
def test_wrong_requests(capsys, words, piece):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "") and piece in err
