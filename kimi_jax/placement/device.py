"""What one accelerator can do, from its data sheet: the numbers a plan is held against.

The file format is the one of sharding/devices/mi355x.toml: every number is a table of a value and its source, and a
value that nobody has published is the word "unknown" (None here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.placement import toml_file
from kimi_jax.problems import ProblemsError, nearest

TEXTS = ("description", "platform", "target")
NUMBERS = ("devices", "hbm_bytes", "hbm_bandwidth", "link_bandwidth", "link_latency", "launch_latency")
DTYPES = ("fp4", "fp8", "bf16", "fp32")
COMPILER = (
    "cores",
    "core_threads",
    "core_fpus",
    "block_threads",
    "warp_threads",
    "shared_memory",
    "registers",
    "l2_cache",
    "clock",
)


class DeviceError(ProblemsError):
    """A device file that cannot be read."""


@dataclass(frozen=True)
class Device:
    """One accelerator of a node.

    Attributes:
      name: of the file.
      description: the product.
      platform: as JAX names it: "rocm", "cuda", "cpu".
      target: the compiler's name of the chip ("gfx950"), or "".
      devices: accelerators in a node, all linked to one another.
      hbm_bytes: memory that can be addressed, bytes: the printed figure where its GB are 2**30, as memory makers count.
      hbm_bandwidth: bytes/s.
      link_bandwidth: bytes/s one device can send to its node, all links together, one direction.
      link_latency: seconds of one small all-reduce over the node, best published.
      launch_latency: seconds that one more small kernel costs in a stream of dependent ones.
      peaks: (dtype, dense FLOP/s of the matrix units); a dtype that the chip does not multiply is absent.
      sources: (number, where it comes from).
      compiler: (number, value) of what a compiler must know to build for the chip without one; empty where the file
        has no [compiler] table. A core is a compute unit; bytes, registers per core, Hz.
    """

    name: str
    description: str
    platform: str
    target: str
    devices: int | None
    hbm_bytes: int | None
    hbm_bandwidth: float | None
    link_bandwidth: float | None
    link_latency: float | None
    launch_latency: float | None
    peaks: tuple[tuple[str, float | None], ...]
    sources: tuple[tuple[str, str], ...]
    compiler: tuple[tuple[str, float | None], ...] = ()

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s for operands of `dtype` ("fp4", "fp8", "bf16", "fp32").

        A chip without units for the dtype widens the operands first, so the next wider dtype's peak counts. None when
        the number is unknown.

        Raises:
          KeyError: no such dtype.
        """
        if dtype not in DTYPES:
            raise KeyError(f'no peak for "{dtype}"{nearest(dtype, DTYPES)}')
        peaks = dict(self.peaks)
        return next((peaks[wider] for wider in DTYPES[DTYPES.index(dtype) :] if wider in peaks), None)


def load_device(device: str | Path | Device) -> Device:
    """A shipped device by name ("mi355x"), a device file by path (*.toml), or a Device as it is.

    Raises:
      DeviceError: no such file, or all that is wrong in it.
    """
    if isinstance(device, Device):
        return device
    path = toml_file.find("devices", device, DeviceError)
    table = toml_file.parse(path, DeviceError)
    problems = toml_file.unknown_keys(table, (*TEXTS, *NUMBERS, "peak", "compiler"), "the file")
    for key in TEXTS:
        problems += toml_file.wrong_type(table, key, str, "")
    peak, chip = _table(table, "peak", DTYPES, problems), _table(table, "compiler", COMPILER, problems)
    stated = {
        **{key: table.get(key) for key in NUMBERS},
        **{f"peak.{dtype}": peak[dtype] for dtype in DTYPES if dtype in peak},
        **{f"compiler.{key}": chip[key] for key in COMPILER if key in chip},
    }
    for key, number in stated.items():
        problems += _number_problems(key, number)
    if problems:
        raise DeviceError(f"Device file {path}", problems)
    values = {key: None if number["value"] == "unknown" else number["value"] for key, number in stated.items()}
    return Device(
        name=path.stem,
        description=table.get("description", ""),
        platform=table.get("platform", ""),
        target=table.get("target", ""),
        devices=values["devices"],
        hbm_bytes=values["hbm_bytes"],
        hbm_bandwidth=values["hbm_bandwidth"],
        link_bandwidth=values["link_bandwidth"],
        link_latency=values["link_latency"],
        launch_latency=values["launch_latency"],
        peaks=tuple((dtype, values[f"peak.{dtype}"]) for dtype in DTYPES if dtype in peak),
        sources=tuple((key, number["source"]) for key, number in stated.items()),
        compiler=tuple((key, values[f"compiler.{key}"]) for key in COMPILER if key in chip),
    )


def _table(table: Mapping[str, Any], name: str, known: tuple[str, ...], problems: list[str]) -> Mapping[str, Any]:
    """A sub-table, empty where it is absent or none; what is wrong with it joins the problems."""
    found = table.get(name, {})
    if not isinstance(found, dict):
        problems.append(f"{name} must be a table, got {found!r}")
        return {}
    problems += toml_file.unknown_keys(found, known, f"[{name}]")
    return found


def _number_problems(key: str, number: Any) -> list[str]:
    """What is wrong with one `{ value = ..., source = "..." }`."""
    if not isinstance(number, Mapping):
        return [f'{key} must be {{ value = a number or "unknown", source = "where it comes from" }}, got {number!r}']
    problems = toml_file.unknown_keys(number, ("value", "source"), key)
    value, source = number.get("value"), number.get("source")
    if value != "unknown" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        problems.append(f'{key}.value must be a positive number or "unknown", got {value!r}')
    if not isinstance(source, str) or not source.strip():
        problems.append(f"{key}.source must say where the number comes from")
    return problems
