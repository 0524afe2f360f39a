"""Getting the ROCm compiler: every reason why it cannot be had is said, and nothing is left half done."""

import subprocess
import zipfile
from pathlib import Path

import jax
import pytest

from kimi_jax.placement.aot import compile_only_devices, target_description
from kimi_jax.placement.device import load_device
from kimi_jax.placement.rocm import stubs, wheel
from kimi_jax.placement.rocm.problem import TargetError


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return wheel.cache_folder()


def pretend_pip(monkeypatch, status: int, stderr: str = "", files: tuple[str, ...] = ()) -> None:
    """A pip that writes a wheel of ``files``, or fails."""

    def run(words, **_):
        if status == 0:
            with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "plugin.whl", "w") as archive:
                for name in files:
                    archive.writestr(name, "library")
        return subprocess.CompletedProcess(words, status, "", stderr)

    monkeypatch.setattr(wheel.subprocess, "run", run)


def test_the_wheel_is_unpacked_outside_the_environment_and_fetched_once(cache, monkeypatch):
    # Red when the unpacked folder is not looked for first.
    pretend_pip(monkeypatch, 0, files=(wheel.LIBRARY,))
    library = wheel.plugin_library()
    assert library == cache / "plugin" / wheel.LIBRARY
    pretend_pip(monkeypatch, 1, "ERROR: fetched again")
    assert wheel.plugin_library() == library
    assert sorted(path.name for path in cache.iterdir()) == ["lock", "plugin"]


def test_why_pip_failed_is_said(cache, monkeypatch):
    # Red when pip's last line is dropped, or a folder stays that the next run takes for the plugin.
    pretend_pip(monkeypatch, 1, "noise\nERROR: No matching distribution found\n")
    with pytest.raises(
        TargetError, match=r"pip cannot fetch jax-rocm7-pjrt==.*: ERROR: No matching distribution found"
    ):
        wheel.plugin_library()
    assert not (cache / "plugin").exists()


def test_a_wheel_without_the_plugin_is_refused(cache, monkeypatch):
    # Red when the wheel's contents are not checked.
    pretend_pip(monkeypatch, 0, files=("something/else.so",))
    with pytest.raises(TargetError, match="holds no jax_plugins"):
        wheel.plugin_library()
    assert not (cache / "plugin").exists()


def test_another_machine_is_named(monkeypatch):
    # Red when the wheel is fetched for a machine that cannot load it.
    monkeypatch.setattr(wheel.platform, "machine", lambda: "arm64")
    with pytest.raises(TargetError, match="linux on x86_64; this is linux on arm64"):
        wheel.plugin_library()


def test_another_jax_is_named(monkeypatch):
    # Red when a plugin of another line is taken: it fails on the kernels' bytecode.
    monkeypatch.setattr(jax, "__version__", "0.11.0")
    with pytest.raises(TargetError, match=r"JAX 0\.11\.0"):
        wheel.wheel_version()


def test_all_missing_tools_are_named_at_once(tmp_path, monkeypatch):
    # Red when the first missing tool ends the search.
    monkeypatch.setattr(stubs, "DRIVER", tmp_path / "absent")
    monkeypatch.setattr(stubs.shutil, "which", lambda tool: None)
    with pytest.raises(TargetError) as caught:
        stubs.load_stand_ins(tmp_path / "plugin.so", tmp_path / "stubs")
    assert caught.value.problems == ("gcc is not installed", "readelf is not installed", "nm is not installed")


def test_stand_ins_are_refused_where_a_gpu_is(tmp_path, monkeypatch):
    # Red when the driver is not looked for: the stand-ins would answer for the real libraries.
    monkeypatch.setattr(stubs, "DRIVER", tmp_path)
    with pytest.raises(TargetError, match="real driver"):
        stubs.load_stand_ins(tmp_path / "plugin.so", tmp_path / "stubs")


def test_another_platform_is_no_compile_only_target():
    # Red when the platform is not checked before the wheel is fetched.
    with pytest.raises(TargetError, match="its platform is 'cuda'"):
        compile_only_devices(load_device("h200"), 8)


def test_a_chip_without_a_description_is_refused():
    # Red when missing numbers are sent as zeros.
    with pytest.raises(TargetError, match=r"no number for \[compiler\] cores, core_threads"):
        compile_only_devices(load_device("mi300x"), 8)


def test_the_description_holds_the_numbers_of_the_device_file():
    # Red when a number is written under another one's name.
    text = target_description(load_device("mi355x"))
    for piece in (
        "threads_per_warp: 64",
        "shared_memory_per_block: 163840",
        "core_count: 256",
        "registers_per_block_limit: 131072",
        "clock_rate_ghz: 2.4",
        'gcn_arch_name: "gfx950:sramecc+:xnack-"',
    ):
        assert piece in text
