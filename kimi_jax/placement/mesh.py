"""The device mesh of a layout, and one without devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from kimi_jax.placement.device import Device
from kimi_jax.placement.layout import Layout, LayoutError


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a layout over the first `layout.devices` devices, every axis Auto.

    Args:
      layout: gives the axes and their sizes, in order.
      devices: defaults to `jax.devices()`.

    Raises:
      LayoutError: too few devices; on CPU the hint is the line that makes fake ones.
    """
    available = list(jax.devices() if devices is None else devices)
    if len(available) < layout.devices:
        raise LayoutError(
            f'Layout "{layout.name}" cannot be placed',
            [f"it needs {layout.devices} devices, there are {len(available)}"],
            _hint(layout, available),
        )
    auto = (AxisType.Auto,) * len(layout.mesh)  # jax.make_mesh defaults to Explicit, which refuses plain contractions
    return jax.make_mesh(tuple(layout.mesh.values()), tuple(layout.mesh), auto, devices=available)


def abstract_mesh(layout: Layout, device: Device) -> AbstractMesh:
    """The mesh of a layout over devices that are only described: programs over it are lowered, never compiled or run.

    Args:
      layout: gives the axes and their sizes, in order.
      device: its platform and the compiler's name of its chip, which kernels are lowered for.
    """
    cores = dict(device.compiler).get("cores")
    described = AbstractDevice(
        device_kind=device.target, num_cores=None if cores is None else int(cores), platform=device.platform
    )
    auto = (AxisType.Auto,) * len(layout.mesh)
    return AbstractMesh(tuple(layout.mesh.values()), tuple(layout.mesh), auto, abstract_device=described)


def _hint(layout: Layout, available: Sequence[Any]) -> str:
    if all(device.platform == "cpu" for device in available):
        return f'Before the first use of JAX add: jax.config.update("jax_num_cpu_devices", {layout.devices})'
    return f"Copy the layout and make the product of its mesh at most {len(available)}."
