"""What the device check times, compiled for an MI355X: the calls of a turn stand in the loop, and nothing else of weight does."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.testing.device_check import clock
from kimi_jax.testing.device_check.catalogue import catalogue

TURNS = 50
CARRIED = 2 * (12 * 128 * 128 * 4 + 3 * 3 * 1536 * 2)
"""Bytes of two copies of a KDA layer's state and windows on one of eight devices."""


@pytest.mark.parametrize(
    ("name", "kernels", "carried"),
    [
        ("linear.project_many/kda-decode-1", 1, 0),
        ("mla.attend/decode-1-short-bf16", 3, 0),
        ("kda.attend/verify", 1, CARRIED),
    ],
)
def test_a_turn_calls_every_copy(mi355x, monkeypatch, name, kernels, carried):
    monkeypatch.setattr(clock, "MOST_COPIES", 2)
    case = catalogue("k3-tp8")[name]
    copies, _ = clock.copies_of(case, 256 << 20)
    mesh, whole = Mesh(np.array(compile_only_devices(mi355x, 8)[:1]), ("one",)), PartitionSpec()
    one = NamedSharding(mesh, whole)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), case.inputs())
    turns = lambda own, carried: clock._turns(case, "pallas", TURNS, None, own, carried)  # noqa: E731
    mapped = jax.shard_map(turns, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    timed = jax.jit(mapped, donate_argnums=1)
    built = timed.lower([inputs.own] * copies, [inputs.carried] * copies).compile()
    assert built.memory_analysis().alias_size_in_bytes == carried  # red when a state is copied at every turn
    blocks = re.split(r"^(?=\S.*\{$)", built.as_text(), flags=re.MULTILINE)
    calls = [block.count("__gpu$xla.gpu.triton") for block in blocks if "__gpu$xla.gpu.triton" in block]
    assert calls == [copies * kernels]  # red when a call that reads nothing new leaves the loop
    (entry,) = [block for block in blocks if block.startswith("ENTRY")]
    assert "__gpu$xla.gpu.triton" not in entry
    (body,) = [block for block in blocks if block.count("__gpu$xla.gpu.triton")]
    assert not re.search(r" copy\(", body)
    assert f'"known_trip_count":{{"n":"{TURNS}"}}' in built.as_text()  # else the host is asked after every turn
