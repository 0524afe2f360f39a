"""What a model needs of a machine, in bytes, worked out by the planner."""

from dataclasses import dataclass

from kimi_jax.config import KimiConfig
from kimi_jax.placement.device import Device
from kimi_jax.placement.layout import Layout
from kimi_jax.planning.ask import text_parameters, vision_arrays
from kimi_jax.planning.plan import plan
from kimi_jax.precision import Precision

COMPILER_BYTES = 4 << 30
"""Host memory of the largest compile: the full-size decode loop took 3.2 GiB (docs/compiled/k3-tp8-decode.json)."""


@dataclass(frozen=True)
class Need:
    """What one model on one layout needs.

    Attributes:
      model: its name.
      layout: where it shall lie.
      context: tokens of the one sequence that is held.
      device_bytes: weights and running state of one device.
      device_memory: of one device as its data sheet says; None where it is the machine's own memory.
      files: bytes of the released weight files.
      host: memory of the machine: on CPU every device lives there; else the parameter on its way, twice, and the compiler.
    """

    model: str
    layout: Layout
    context: int
    device_bytes: int
    device_memory: int | None
    files: int
    host: int


def need_of(config: KimiConfig, layout: Layout, device: Device, context: int) -> Need:
    """Works it out.

    Raises:
      LayoutError: the layout cannot place the model.
    """
    context = min(context, config.max_positions)
    vision = "off" if config.vision is None else "replicated"
    found = plan(config, layout, device, context, kv_dtype="bfloat16", vision=vision)
    stored = text_parameters(config, Precision())
    sizes = [spec.nbytes for spec in stored.values()]
    files = sum(sizes) + sum(spec.nbytes for spec in vision_arrays(config, Precision()).values())
    held = found.sizes.device_bytes
    on_cpu = device.platform == "cpu"
    host = held * layout.devices if on_cpu else 2 * max(sizes) + COMPILER_BYTES
    return Need(config.name, found.ask.placed, context, held, None if on_cpu else device.hbm_bytes, files, host)
