"""Two blocks of the released tower's width, compiled for MI355X by the real compiler."""

import dataclasses
import re
from collections import Counter

import jax
import pytest

from kimi_jax.config import load_config
from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import Precision
from kimi_jax.vision_steps import VisionSteps

pytestmark = pytest.mark.slow
AXES = {
    "replicated": (1, {}),
    "images": (8, {"images": "tensor"}),
    "split": (4, {"vision_heads": "tensor", "vision_ffn": "tensor"}),
}


@pytest.mark.parametrize("place, reductions", [("replicated", 0), ("images", 0), ("split", 2 * 2 + 1)])
def test_what_a_call_takes_and_exchanges(mi355x, place, reductions):
    # red when a device waits for others though its pictures are its own, or a partial sum is added up twice
    devices, axes = AXES[place]
    layout = Layout(place, mesh={"tensor": devices}, axes=axes)
    mesh = make_mesh(layout, compile_only_devices(mi355x, devices))
    vision = load_config("k3").vision
    assert vision is not None
    made = VisionSteps(dataclasses.replace(vision, layers=2), layout, mesh, Precision())
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=jax.NamedSharding(mesh, layout.spec(spec)))
        for name, spec in made.parameters.items()
    }
    compiled = made.encode.trace(params, made.describe_call(1024)).lower().compile()
    found = Counter(re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text()))
    assert found == ({"all-reduce": reductions} if reductions else {})
    memory = compiled.memory_analysis()
    assert memory is not None
    held = sum(layout.local_bytes(spec) for spec in made.parameters.values())
    assert memory.argument_size_in_bytes - held < 1024 * (588 * 4 + 40)
    assert memory.output_size_in_bytes == 256 * 7168 * 2
