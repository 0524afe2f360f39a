"""The ROCm plugin, unpacked from its wheel into a cache folder.

Never installed into the environment: there it would try to start at every import of JAX and complain that no GPU is
present.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax

from kimi_jax.placement.rocm.problem import TargetError

PACKAGE = "jax-rocm7-pjrt"
WHEELS = {"0.10.2": "0.10.2", "0.12.0.1": "0.12.0"}
"""JAX -> the plugin that understands the kernels it writes; another one fails on their bytecode."""

LIBRARY = "jax_plugins/xla_rocm7/xla_rocm_plugin.so"
FETCH_SECONDS = 900


def wheel_version() -> str:
    """The plugin's version for the running JAX.

    Raises:
      TargetError: no plugin is known for it.
    """
    if jax.__version__ not in WHEELS:
        raise TargetError(
            f"No ROCm compiler for JAX {jax.__version__}", [f"{PACKAGE} is known for JAX {', '.join(WHEELS)}"]
        )
    return WHEELS[jax.__version__]


def cache_folder() -> Path:
    """Where the plugin is kept: ``$XDG_CACHE_HOME/kimi_jax/rocm-VERSION`` (``~/.cache`` where unset)."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kimi_jax" / f"rocm-{wheel_version()}"


def plugin_library() -> Path:
    """The plugin's shared library; fetched (about 150 MB) and unpacked (about 480 MB) the first time.

    Raises:
      TargetError: the platform has no wheel, or it cannot be fetched or unpacked; names the reason.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        found = f"this is {sys.platform} on {platform.machine()}"
        raise TargetError("No ROCm compiler here", [f"{PACKAGE} is built for linux on x86_64; {found}"])
    folder = cache_folder()
    library = folder / "plugin" / LIBRARY
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests in two processes want it at once
            if not library.exists():
                _unpack(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise TargetError("No ROCm compiler here", [f"{folder}: {error}"]) from error
    return library


def _unpack(folder: Path) -> None:
    """Fetches the wheel and puts its files under ``folder/plugin``, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = _fetch(Path(scratch))
        files = Path(scratch) / "plugin"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(files)
        if not (files / LIBRARY).exists():
            raise TargetError("No ROCm compiler here", [f"{wheel.name} holds no {LIBRARY}"])
        shutil.rmtree(folder / "plugin", ignore_errors=True)
        files.rename(folder / "plugin")


def _fetch(folder: Path) -> Path:
    """The wheel, downloaded by this environment's pip."""
    wanted = f"{PACKAGE}=={wheel_version()}"
    words = [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        wanted,
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise TargetError("No ROCm compiler here", [f"pip took over {FETCH_SECONDS} s to fetch {wanted}"]) from error
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1].strip() if said else f"exit status {done.returncode}"
        raise TargetError("No ROCm compiler here", [f"pip cannot fetch {wanted}: {why}"])
    return found[0]
