"""The device at hand: what JAX and the driver call it, and what its data sheet says."""

import importlib.metadata
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import jax

import kimi_jax
from kimi_jax.placement.compiler import platform_of
from kimi_jax.placement.device import Device, load_device

KNOWN = ("mi355x", "mi300x", "h200")
"""Device files that a kind may be one of."""

LAST_CACHE = {
    # AMD CDNA 3 and CDNA 4 white papers: Infinity Cache in front of the memory
    "mi355x": 256 << 20,
    "mi300x": 256 << 20,
    # NVIDIA Hopper tuning guide: 50 MB level 2 cache of the H100, the same die
    "h200": 50 << 20,
}
"""Bytes of the cache nearest to memory."""

LARGEST_CACHE = max(LAST_CACHE.values())
"""What an unknown device is taken to have."""

PACKAGES = re.compile(r"jax.*|flax|numpy|ml[-_]dtypes")
DRIVERS = ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Found:
    """The first device of this process.

    Attributes:
      kind: as JAX names it.
      platform: cpu, rocm or cuda.
      runtime: version of what drives it, as JAX says.
      driver: version of the kernel's driver, or the kernel's own where there is none to read.
      count: devices that JAX sees.
      memory_bytes: that JAX may take; None where it does not say.
      versions: of Python, of this package and of what it runs on.
    """

    kind: str
    platform: str
    runtime: str
    driver: str
    count: int
    memory_bytes: int | None
    versions: dict[str, str]


def find() -> Found:
    """Starts JAX."""
    devices = jax.devices()
    first = devices[0]
    installed = {
        d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]
    }
    versions = {name: installed[name] for name in sorted(installed) if PACKAGES.fullmatch(name)}
    return Found(
        first.device_kind,
        platform_of(first),
        first.client.platform_version,
        _driver(),
        len(devices),
        (first.memory_stats() or {}).get("bytes_limit"),
        {"python": platform.python_version(), "kimi-jax": kimi_jax.__version__, **versions},
    )


def known_device(kind: str) -> Device | None:
    """The device file of a kind; None where there is none.

    By the product's name, or by the compiler's name of the chip from drivers that say no product.
    """
    devices = [load_device(name) for name in KNOWN]
    for of in ("name", "target"):
        for device in devices:
            if re.search(rf"\b{getattr(device, of)}\b", kind, re.IGNORECASE):
                return device
    return None


def _driver() -> str:
    for path in map(Path, DRIVERS):
        try:
            return path.read_text(encoding="utf-8").splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return f"kernel {platform.release()}"
