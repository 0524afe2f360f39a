"""The tiny tower of the golden data."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.parameters import read_parameters
from kimi_jax.config import KimiConfig, VisionConfig, parse
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import Precision, choose_precision
from kimi_jax.testing.configs import config_json
from kimi_jax.vision_steps import VisionSteps

FOLDER = Path(__file__).parents[1] / "fixtures" / "vision-tiny"
EXACT = choose_precision("float32")
TOLERANCE = 2e-5


@cache
def config() -> KimiConfig:
    """The tower beside a text model that nobody loads."""
    vision = json.loads((FOLDER / "config.json").read_text())["vision_config"]
    return parse({**config_json(hidden_size=vision["text_hidden_size"]), "vision_config": vision})


def vision() -> VisionConfig:
    found = config().vision
    assert found is not None
    return found


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "golden.npz") as arrays:
        return dict(arrays)


def layout(devices: int = 1, **axes: str) -> Layout:
    """One mesh axis, mapped by what is said of each named axis; ``single`` where nothing is."""
    return Layout("test", mesh={"tensor": devices}, axes=axes) if axes or devices > 1 else load_layout("single")


@cache
def steps(placed: Layout, buckets: tuple[int, ...] = (160,), block: int = 32, precision: Precision = EXACT):
    return VisionSteps(vision(), placed, make_mesh(placed), precision, buckets, block)


@cache
def params(placed: Layout, precision: Precision = EXACT):
    stored = vision_parameters(config(), Precision())
    return read_parameters(FOLDER, stored, vision_parameters(config(), precision), placed, make_mesh(placed))
