"""Compile-only devices: the real compiler of a device file's chip, on a machine that has none."""

from __future__ import annotations

import functools
from typing import Any

from jax._src import xla_bridge  # private: the pins of jax guard it, and tests/compiled would fail
from jax.experimental import topologies

from kimi_jax.placement.device import COMPILER, Device
from kimi_jax.placement.rocm.problem import TargetError
from kimi_jax.placement.rocm.stubs import load_stand_ins
from kimi_jax.placement.rocm.wheel import cache_folder, plugin_library

PLATFORM = "rocm"


def compile_only_devices(device: Device, count: int) -> list[Any]:
    """Devices that programs can be compiled for and never run on.

    Args:
      device: its file must have a ``[compiler]`` table.
      count: how many, all linked to one another.

    Raises:
      TargetError: the chip cannot be compiled for here; names every reason.
    """
    problems = []
    if device.platform != PLATFORM:
        problems.append(f"its platform is {device.platform!r}; compile-only targets are built for {PLATFORM}")
    known = dict(device.compiler)
    missing = [key for key in COMPILER if known.get(key) is None]
    if device.platform == PLATFORM and missing:
        problems.append(f"its file has no number for [compiler] {', '.join(missing)}")
    if problems:
        raise TargetError(f"{device.name} is no compile-only target", problems, "What works: mi355x.")
    _register()
    try:
        topology = topologies.get_topology_desc(
            "", PLATFORM, topology=f"1x1x{count}", target_config=target_description(device)
        )
    except Exception as error:  # whatever the plugin says, it says it here
        raise TargetError(f"The ROCm compiler refuses {device.name}", [str(error)]) from error
    return list(topology.devices)


def target_description(device: Device) -> str:
    """The chip as the compiler wants it: a text proto, ``gpu_device_info`` and the names."""
    of = {key: int(number) for key, number in device.compiler if number is not None}
    chip = f"{device.target}:sramecc+:xnack-"
    lds, clock = of["shared_memory"], of["clock"] / 1e9
    return f"""
gpu_device_info {{
  threads_per_block_limit: {of["block_threads"]} threads_per_warp: {of["warp_threads"]}
  shared_memory_per_block: {lds} shared_memory_per_block_optin: {lds} shared_memory_per_core: {lds}
  threads_per_core_limit: {of["core_threads"]} core_count: {of["cores"]} fpus_per_core: {of["core_fpus"]}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65536 block_dim_limit_z: 65536
  memory_bandwidth: {int(device.hbm_bandwidth or 0)} l2_cache_size: {of["l2_cache"]} clock_rate_ghz: {clock}
  device_memory_size: {device.hbm_bytes or 0}
  registers_per_core_limit: {of["registers"]} registers_per_block_limit: {of["registers"]}
  rocm_compute_capability {{ gcn_arch_name: "{chip}" }}
}}
platform_name: "ROCM"
dnn_version_info {{ }}
device_description_str: "{chip}"
"""


@functools.cache
def _register() -> None:
    """Makes the plugin known to JAX, once in a process; lowest priority, so that it is never chosen to run anything."""
    library = plugin_library()
    load_stand_ins(library, cache_folder() / "stubs")
    xla_bridge.register_plugin(
        PLATFORM, priority=-1, library_path=str(library), options={"platform_name": PLATFORM.upper()}
    )
