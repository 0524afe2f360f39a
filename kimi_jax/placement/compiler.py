"""The platform of a device, and what its compiler is told beside the program: the same for a step that runs and a compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import AbstractMesh, Mesh

OPTIONS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "rocm": MappingProxyType(
            {
                # Products with one input are else merged by writing their weights side by side at every call.
                "xla_gpu_dot_merger_threshold_mb": 0,
                # The routed and the shared sums of a long chunk (44 MB for 2,048 tokens) are else reduced one by one.
                "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 28,
            }
        ),
        "cuda": MappingProxyType({"xla_gpu_dot_merger_threshold_mb": 0}),
    }
)


def platform_of(device: Any) -> str:
    """``cpu``, ``rocm`` or ``cuda`` for a device of JAX, which calls the last two both ``gpu``.

    A compile-only device says its chip instead of its driver.
    """
    if device.platform != "gpu":
        return device.platform
    said = f"{device.client.platform_version} {device.device_kind}".lower()
    return "rocm" if "rocm" in said or "gfx" in said else "cuda"


def platform_of_mesh(mesh: Mesh | AbstractMesh) -> str:
    """The platform that programs over a mesh are for; an abstract mesh says it itself (``abstract_mesh``)."""
    if isinstance(mesh, AbstractMesh):
        return mesh.abstract_device.platform
    return platform_of(mesh.devices.flat[0])


def compiler_options(platform: str) -> dict[str, int] | None:
    """Options for ``jax.jit``; None where the defaults are right."""
    return dict(OPTIONS[platform]) if platform in OPTIONS else None
