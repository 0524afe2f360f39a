"""Small random checkpoints for the tests of loading and converting, and what was open before and after."""

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kimi_jax import api
from kimi_jax.checkpoint.parameters import read_parameters
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.writer import write_checkpoint
from kimi_jax.config import load_config
from kimi_jax.loop import Steps
from kimi_jax.model import abstract
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import Precision, choose_precision
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

INDEX = "model.safetensors.index.json"
KDA, MLA = "language_model.model.layers.0.self_attn", "language_model.model.layers.1.self_attn"
MOE = "language_model.model.layers.1.block_sparse_moe"
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "full_attention": (2,),
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "kda_head_dim": 8,
    "num_experts": 8,
    "max_position_embeddings": 64,
}
"""Two layers, one of each attention; every shipped layout divides it, and tp8 cuts groups of 32 expert units."""

VISION = {
    "vision_tower.patch_embed.weight": np.arange(30, dtype=np.float32).reshape(5, 6).astype(ml_dtypes.bfloat16),
    "mm_projector.bias": np.linspace(0, 1, 7, dtype=np.float32),
    "vision_tower.steps": np.array(3, np.int64),
}


def small(folder: Path, *, shard_bytes: int = 40_000, tied: bool = False, **changes: Any) -> Path:
    """A random released checkpoint of several shards."""
    config = config_json(**{**SIZES, **changes})
    config["tie_word_embeddings"] = tied
    return write_random_checkpoint(folder, config, tokenizer=False, max_shard_bytes=shard_bytes)


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None], **options: Any) -> Path:
    """The same checkpoint with its tensors changed."""
    options.setdefault("max_shard_bytes", 40_000)
    with CheckpointFolder.open(source) as opened:
        tensors = {name: np.array(opened.read(name)) for name in opened.names()}
    change(tensors)
    write_checkpoint(folder, tensors, **options)
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def with_vision(source: Path, folder: Path, **options: Any) -> Path:
    return rewritten(source, folder, lambda tensors: tensors.update(VISION), **options)


def tensors_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Stored dtype and bytes of every tensor."""
    with CheckpointFolder.open(folder) as opened:
        return {name: (opened.info(name).stored_dtype, opened.read(name).tobytes()) for name in opened.names()}


def over(devices: int) -> Layout:
    """tp8 with another number of devices."""
    return dataclasses.replace(load_layout("tp8"), name=f"tp{devices}", mesh={"data": 1, "tensor": devices})


def stored_of(folder: Path) -> dict[str, ArraySpec]:
    return abstract(load_config(folder), Precision(), Parallel.single())[1]


def specs_of(folder: Path, layout: Layout, precision: Precision | None = None) -> dict[str, ArraySpec]:
    """Parameters as they are placed: float32 operands, as on CPU, unless told otherwise."""
    return abstract(
        load_config(folder), precision or choose_precision("bfloat16", experts="packed"), Parallel.of(layout)
    )[1]


def loaded(folder: Path, layout: Layout | str = "single", precision: Precision | None = None) -> dict[str, jax.Array]:
    """What ``kimi_jax.load`` places."""
    layout = load_layout(layout)
    specs = specs_of(folder, layout, precision)
    tied = load_config(folder).tied_head
    return read_parameters(folder, stored_of(folder), specs, layout, make_mesh(layout), tied_head=tied)


def requantised(folder: Path, layout: Layout | str = "single") -> dict[str, jax.Array]:
    """What ``kimi_jax.load`` places on a GPU with the published FP8 treatment."""
    layout, precision = load_layout(layout), choose_precision("bfloat16", platform="gpu")
    steps = Steps(load_config(folder), layout, make_mesh(layout), dataclasses.replace(precision, fp8="ptpc"), 64)
    return api.read_parameters(folder, steps.config, steps)


def assert_same(got: Mapping[str, jax.Array], expected: Mapping[str, jax.Array]) -> None:
    """Same names in the same order, same shardings, same bytes."""
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].sharding == array.sharding, name
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name


def edited(path: Path, change: Callable[[Any], None]) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No file of a checkpoint stays open, and no array stays on a device."""
    before = len(jax.live_arrays())
    yield
    gc.collect()
    assert not [name for name in _open_files() if "safetensors" in name or "/arrays/" in name]
    assert len(jax.live_arrays()) <= before


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.lexists(path):
            yield os.readlink(path)
