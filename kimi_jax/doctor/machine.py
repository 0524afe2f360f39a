"""What this machine is, gathered once. Nothing here judges, and nothing here can hang or crash the caller."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VARIABLES = (
    "AMD_COMGR_NAMESPACE",
    "XLA_FLAGS",
    "HIP_FORCE_DEV_KERNARG",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "JAX_PLATFORMS",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
"""Environment variables that decide whether the devices start and what they may use."""

PACKAGES = ("jax", "jaxlib", "flax", "jax-rocm7-plugin", "jax-rocm7-pjrt", "rocm-sdk-core")

PROBE_SECONDS = 120
"""Longest start of JAX that is waited for; on a machine that works it takes seconds."""

PROBE = """
import json, jax
from kimi_jax.placement.compiler import platform_of
devices = jax.devices()
stats = [device.memory_stats() or {} for device in devices]
limits = [found.get("bytes_limit") for found in stats]
print(json.dumps({"platform": platform_of(devices[0]), "kinds": [device.device_kind for device in devices], "limits": limits}))
"""
"""Run in a process of its own: a broken driver hangs or kills whoever starts it."""


@dataclass(frozen=True)
class Started:
    """What JAX found when it was started with the environment as it is.

    Attributes:
      platform: "cpu", "rocm", "cuda"; None where JAX did not start.
      kinds: of each device.
      limits: bytes that JAX may take of each device; None where it does not say.
      error: why it did not start.
    """

    platform: str | None = None
    kinds: tuple[str, ...] = ()
    limits: tuple[int | None, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """The facts. Bytes; None is unknown.

    Attributes:
      python: version, three numbers.
      system: as Python names it ("linux").
      architecture: of the processor ("x86_64").
      packages: installed distribution -> version.
      compiler: path of gcc.
      started: what JAX found.
      driver: whether the AMD GPU driver's device file is there.
      driver_opens: whether this user may open it.
      render_nodes: device files of single GPUs.
      vram: memory of each AMD GPU, as the driver says.
      rocm: version of the ROCm libraries.
      environment: those of ``VARIABLES`` that are set.
      shared_bytes: size of /dev/shm.
      memory_bytes: of the machine.
      free_bytes: on the disk of the model's folder.
      model_files: bytes of the files in the model's folder.
    """

    python: str
    system: str
    architecture: str
    packages: Mapping[str, str] = field(default_factory=dict)
    compiler: str | None = None
    started: Started = field(default_factory=Started)
    driver: bool = False
    driver_opens: bool = False
    render_nodes: tuple[str, ...] = ()
    vram: tuple[int, ...] = ()
    rocm: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_bytes: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    model_files: int = 0


def gather(
    model: Path | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    probe: Sequence[str] = (sys.executable, "-c", PROBE),
    seconds: float = PROBE_SECONDS,
) -> Machine:
    """The facts of this machine.

    Args:
      model: a folder, there or not, whose disk is looked at.
      root: where /dev, /sys and /opt are.
      environ: environment variables.
      probe: command that starts JAX and prints what it found.
      seconds: how long it may take.
    """
    packages = {name: version for name in PACKAGES if (version := _installed(name)) is not None}
    driver, render = root / "dev/kfd", root / "dev/dri"
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),  # no suffix of a distributor
        system=sys.platform,
        architecture=platform.machine(),
        packages=packages,
        compiler=shutil.which("gcc"),
        started=start_jax(probe, environ, seconds),
        driver=driver.exists(),
        driver_opens=os.access(driver, os.R_OK | os.W_OK),
        render_nodes=tuple(sorted(path.name for path in render.glob("renderD*"))),
        vram=_vram(root / "sys/class/drm"),
        rocm=_rocm_version(root, environ) or packages.get("rocm-sdk-core"),
        environment={name: environ[name] for name in VARIABLES if name in environ},
        shared_bytes=_disk(root / "dev/shm", total=True),
        memory_bytes=_memory(),
        free_bytes=None if model is None else _disk(_standing(model), total=False),
        model_files=0 if model is None else _files(model),
    )


def start_jax(probe: Sequence[str], environ: Mapping[str, str], seconds: float) -> Started:
    """Starts JAX in another process and reads what it prints last."""
    try:
        done = subprocess.run(list(probe), env=dict(environ), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Started(error=f"JAX did not start within {seconds:g} s")
    except OSError as error:
        return Started(error=f"{probe[0]}: {error.strerror}")
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        how = f"exit status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        return Started(error=f"JAX does not start ({how}){f': {said[-1][:300]}' if said else ''}")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return Started(found["platform"], tuple(found["kinds"]), tuple(found["limits"]))
    except (IndexError, ValueError, KeyError, TypeError):
        return Started(error=f"JAX started and said {done.stdout[-100:]!r}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vram(cards: Path) -> tuple[int, ...]:
    """Memory of each AMD GPU (amdgpu driver, sysfs); one entry per card, not per display connector."""
    found = (_read(card / "device/mem_info_vram_total") for card in sorted(cards.glob("card*")) if "-" not in card.name)
    return tuple(int(text) for text in found if text.isdigit())


def _rocm_version(root: Path, environ: Mapping[str, str]) -> str | None:
    homes = [Path(environ[name]) for name in ("ROCM_PATH", "ROCM_HOME") if environ.get(name)]
    for home in (*homes, root / "opt/rocm"):
        if version := re.match(r"\d+(\.\d+)+", _read(home / ".info/version")):
            return version[0]
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _disk(path: Path, *, total: bool) -> int | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total if total else usage.free


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _standing(path: Path) -> Path:
    """The nearest folder above a path that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _files(folder: Path) -> int:
    found = folder.rglob("*") if folder.is_dir() else ()
    return sum(file.stat().st_size for file in found if file.is_file())
