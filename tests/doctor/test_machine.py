"""Gathering the facts: from a made-up root folder, and from probes that work, fail, crash, hang or babble."""

import json
import sys
from pathlib import Path

import pytest

from kimi_jax.doctor import machine
from kimi_jax.doctor.machine import PROBE, Started, gather, start_jax

GOOD = json.dumps({"platform": "rocm", "kinds": ["a", "b"], "limits": [5, None]})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (f"print('a warning'); print({GOOD!r})", Started("rocm", ("a", "b"), (5, None))),
        (
            "import sys; print('first', file=sys.stderr); sys.exit('no GPU')",
            Started(error="JAX does not start (exit status 1): no GPU"),
        ),
        ("import os; os.abort()", Started(error="JAX does not start (SIGABRT)")),
        ("import time; time.sleep(60)", Started(error="JAX did not start within 0.5 s")),  # red without a timeout
        ("print('hello')", Started(error="JAX started and said 'hello\\n'")),
        ("", Started(error="JAX started and said ''")),
    ],
)
def test_probes(code, found):
    assert start_jax(python(code), {}, 0.5 if "sleep" in code else 60) == found


def test_a_probe_that_is_not_there():
    assert start_jax(["/nowhere/python"], {}, 1).error == "/nowhere/python: No such file or directory"


def test_the_real_probe_starts_jax():
    found = start_jax(python(PROBE), {"JAX_PLATFORMS": "cpu"}, 60)
    assert found == Started("cpu", ("cpu",), (None,))  # red when the probe's own words are broken


@pytest.fixture
def root(tmp_path) -> Path:
    files = {
        "dev/kfd": "",
        "dev/dri/renderD128": "",
        "dev/dri/renderD129": "",
        "dev/dri/card0": "",
        "dev/shm/x": "",
        "opt/rocm/.info/version": "7.2.1-81\n",
        "sys/class/drm/card0/device/mem_info_vram_total": "309220868096\n",
        "sys/class/drm/card1/device/mem_info_vram_total": "309220868096\n",
        "sys/class/drm/card0-DP-1/device/mem_info_vram_total": "1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_facts_of_a_gpu_machine(root, tmp_path):
    probe = python(f"print({GOOD!r})")
    model = tmp_path / "weights"
    model.mkdir()
    (model / "model-00001.safetensors").write_bytes(b"x" * 1000)
    found = gather(model, root, {"XLA_FLAGS": "--a", "HOME": "/root"}, probe)
    assert found.driver and found.driver_opens and found.render_nodes == ("renderD128", "renderD129")
    assert found.vram == (309220868096,) * 2  # red when a display connector counts as a card
    assert found.rocm == "7.2.1" and found.environment == {"XLA_FLAGS": "--a"}
    assert found.started.platform == "rocm" and found.model_files == 1000
    assert found.shared_bytes and found.free_bytes and found.packages["jax"]


def test_rocm_path_goes_first(root, tmp_path):
    (tmp_path / "mine/.info").mkdir(parents=True)
    (tmp_path / "mine/.info/version").write_text("7.14.0")
    assert gather(None, root, {"ROCM_PATH": str(tmp_path / "mine")}, python("")).rocm == "7.14.0"


def test_a_machine_with_nothing(tmp_path, monkeypatch):
    looked, real = [], machine.shutil.disk_usage
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: looked.append(path) or real(path))
    found = gather(tmp_path / "not" / "there", tmp_path, {}, python(""))
    assert not found.driver and not found.render_nodes and not found.vram and found.rocm is None
    assert found.shared_bytes is None and found.model_files == 0
    assert found.free_bytes and looked[-1] == tmp_path  # red when a folder that is still to be made has another disk
