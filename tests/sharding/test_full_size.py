"""The released Kimi-K3, whole, without a byte of it: names, shapes and dtypes of all tensors, and its cut in eight."""

import json
import math
import re
import time
from collections import Counter
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.checkpoint.header import CheckpointError, TensorInfo
from kimi_jax.checkpoint.names import Source, check, sources
from kimi_jax.config import load_config
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.model import abstract
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import load_layout, validate
from kimi_jax.precision import BFLOAT16, Precision

TABLE = Path(__file__).parents[1] / "fixtures" / "tensors-kimi-k3.json"
EXPERTS = 896
DTYPES = {"BF16": BFLOAT16, "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
NORM = "language_model.model.norm.weight"


def tensor(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "release", DTYPES[dtype], shape, math.prod(shape) * DTYPES[dtype].itemsize, dtype, 0)


@cache
def released() -> dict[str, TensorInfo]:
    """Every tensor of the release, spelled out from its table."""
    found = {}
    for entry in json.loads(TABLE.read_text()):
        for name in spelled(entry):
            found[name] = tensor(name, entry["dtype"], *entry["shape"])
    return found


def spelled(entry: dict) -> list[str]:
    pattern, layers = entry["pattern"], entry["layers"] or [0]
    experts = range(EXPERTS) if "{E}" in pattern else [0]
    names = [
        pattern.replace("{L}", str(layer)).replace("{B}", str(layer)).replace("{E}", str(expert))
        for layer in layers
        for expert in experts
    ]
    assert len(set(names)) == entry["count"], pattern
    return names


@cache
def described() -> dict[str, ArraySpec]:
    return abstract(load_config("k3"), Precision(), Parallel.of(load_layout("tp8")))[1]


@cache
def wanted() -> dict[str, Source]:
    return sources(described())


def test_nothing_is_allocated_and_it_is_quick():
    # red when a parameter is made instead of described: the whole model would need 1.5 TB
    before, began = len(jax.live_arrays()), time.perf_counter()
    specs = abstract(load_config("k3"), Precision(), Parallel.of(load_layout("tp8")))[1]
    layout = load_layout("tp8")
    validate(layout, specs, "Kimi-K3")
    local = sum(map(layout.local_bytes, specs.values()))
    assert time.perf_counter() - began < 60
    assert len(jax.live_arrays()) <= before
    assert local == pytest.approx(205.057e9, abs=1e6)  # the plan's total for one of eight devices


def test_every_tensor_of_the_release_has_its_place():
    # red when any name, shape or dtype differs; what is left unread is the vision tower and nothing else
    skipped = check(released(), wanted(), "the release")
    assert len(released()) == 497_220
    assert len(skipped) == 168
    used = {name for source in wanted().values() for name in source.names}
    assert len(used) == 497_052
    assert used == set(released()) - set(skipped)


@cache
def wanted_with_vision() -> dict[str, Source]:
    return sources({**described(), **vision_parameters(load_config("k3"), Precision())})


def test_with_vision_every_tensor_has_its_place():
    # red when a tensor of the tower is left unread, renamed or reshaped
    assert check(released(), wanted_with_vision(), "the release") == ()
    used = {name for source in wanted_with_vision().values() for name in source.names}
    assert used == set(released())
    assert len(used) == 497_220


def test_sizes_of_the_tower_and_the_projector():
    # red when a parameter is missing or has another shape than the published counts say
    sizes = Counter()
    for name, spec in vision_parameters(load_config("k3"), Precision()).items():
        sizes[name.split(".")[0]] += math.prod(spec.shape)
        sizes["tensors of", name.split(".")[0]] += 1
    assert (sizes["vision_tower"], sizes["tensors of", "vision_tower"]) == (401_214_464, 165)
    assert (sizes["mm_projector"], sizes["tensors of", "mm_projector"]) == (46_144_512, 3)


@pytest.mark.parametrize(
    "name, found, message",
    [
        ("mm_projector.pre_norm.weight", ("BF16", 1024), "belongs to no parameter"),
        ("vision_tower.encoder.blocks.13.wqkv.weight", ("BF16", 3, 1536, 1024), r"expected \[4608, 1024\]"),
    ],
    ids=["unused", "shape"],
)
def test_one_tensor_of_the_tower_off(name, found, message):
    # red when a load with vision skips what a load of the text alone may skip
    infos = {**released(), name: tensor(name, *found)}
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*{message}"):
        check(infos, wanted_with_vision(), "the release")


def test_bytes_of_the_release():
    # red when the table or the model counts a tensor twice or in another dtype
    stored = sum(info.nbytes for info in released().values())
    assert stored == 1_560_860_324_864
    unread = sum(released()[name].nbytes for name in check(released(), wanted(), "the release"))
    padding = 69 * 32 * 4  # A_log is stored with 128 entries, of which 96 are values
    assert sum(spec.nbytes for spec in described().values()) == stored - unread - padding


def test_the_decay_slopes_are_narrowed():
    # red when A_log takes its stored length, or a checkpoint with exactly one entry per head is refused (PF-24)
    slopes = {name: spec for name, spec in described().items() if name.endswith("A_log")}
    assert {spec.shape for spec in slopes.values()} == {(96,)}
    assert len(slopes) == 69
    shorter = {name: tensor(name, "F32", 96) if name.endswith("A_log") else info for name, info in released().items()}
    check(shorter, wanted(), "another release")


LAST = "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"


@pytest.mark.parametrize(
    "name, found, message",
    [
        (LAST, None, "is missing"),
        ("language_model.model.rotary.inv_freq", ("F32", 32), "belongs to no parameter"),
        (NORM, ("BF16", 7167), r"shape \[7167\]"),
        (NORM, ("F32", 7168), "is F32; expected BF16"),
    ],
    ids=["missing", "unused", "shape", "dtype"],
)
def test_one_tensor_off_in_half_a_million(name, found, message):
    # red when a check looks at a sample, or at counts only (PF-30, PF-34)
    infos = {**released(), name: tensor(name, *found)} if found else {n: i for n, i in released().items() if n != name}
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*{message}"):
        check(infos, wanted(), "the release")


def test_kinds_and_residual_blocks_of_the_release():
    # red when the two lists of the config are read as 0-based, or the last layer's block is counted wrongly (PF-13)
    config = load_config("k3")
    assert Counter(config.attention) == {"kda": 69, "mla": 24}
    assert config.attention[3] == config.attention[91] == config.attention[92] == "mla"
    assert [layer for layer in range(93) if config.starts_block(layer)] == list(range(0, 93, 12))
    assert np.all([config.is_dense(layer) == (layer == 0) for layer in range(93)])
