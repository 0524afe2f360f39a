"""The kernels of KDA at the sizes of Kimi-K3, built for an MI355X: 12 heads on one of eight devices, 96 on one alone."""

import math
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.ops.kda import api
from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.codeobjects import Kernel, kernels_of
from kimi_jax.planning import compile as compiling

DIM, TAPS = 128, 4
LDS = 160 << 10
"""Local memory of a compute unit (sharding/devices/mi355x.toml)."""


class Built(NamedTuple):
    """What the compiler made of one call: kernels not built before by name, launches, most local memory, bytes."""

    kernels: dict[str, Kernel]
    launches: list[str]
    shared: int
    temp: int
    aliased: int
    held: int


@pytest.fixture
def build(mi355x, tmp_path):
    mesh = Mesh(np.array(compile_only_devices(mi355x, 8)[:1]), ("one",))
    whole, folder = PartitionSpec(), compiling._kernel_folder()

    def run(rows: int, tokens: int, heads: int, dtype: Any = jnp.bfloat16) -> Built:
        def array(*shape: int, dtype: Any = dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

        wide, channels = partial(array, dtype=jnp.float32), heads * DIM
        projected = api.Projected(
            *[array(rows, tokens, channels)] * 4, array(rows, tokens, DIM), array(rows, tokens, heads)
        )
        filters = [wide(channels, 1, TAPS)] * 3
        weights = api.Weights(*filters, array(channels, DIM), wide(heads), wide(heads, DIM), wide(DIM))
        windows, state = array(rows, 3, TAPS - 1, channels), wide(rows, heads, DIM, DIM)
        lengths = array(rows, dtype=jnp.int32)
        call = partial(api.attend, lower_bound=-5.0, eps=1e-5, impl="pallas")
        mapped = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        before = set(folder.glob("*.hsaco"))
        with tempfile.TemporaryDirectory() as dump, compiling._kernels_kept():
            lowered = jax.jit(mapped, donate_argnums=(2, 3)).lower(projected, weights, windows, state, lengths)
            program = lowered.compile(compiler_options=compiling._options(dump))
            thunks = sorted(Path(dump).glob("*thunk_sequence*.txt"))[-1].read_text()
        new = sorted(set(folder.glob("*.hsaco")) - before)
        memory = program.memory_analysis()
        return Built(
            {kernel.name: kernel for path in new for kernel in kernels_of(path.read_bytes())},
            re.findall(r": kC\w+ +\[.*?\] (\w+)", thunks),
            max(int(size) for size in re.findall(r"shared_memory: (\d+)", thunks)),
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
            sum(math.prod(x.shape) * x.dtype.itemsize for x in (windows, state)),
        )

    return run


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("rows", "tokens", "heads"),
    [(1, 1, 12), (8, 1, 12), (1, 1, 96), (1, 2, 12), (8, 2, 12), pytest.param(1, 8, 12, marks=slow)],
)
def test_step_is_one_launch_in_registers_and_in_place(build, rows, tokens, heads):
    # red when a part is left to XLA, state or windows are not aliased, or 4 rows of the state are loaded twice
    built = build(rows, tokens, heads)
    assert built.launches == ["kda_step"]
    assert (built.temp, built.aliased) == (0, built.held)
    kernel = built.kernels["kda_step"]
    assert kernel.spills == 0 and kernel.scratch == 0
    assert kernel.vgprs <= 256  # eight warps, two on each of four vector units of 512 registers
    assert built.shared <= LDS


@pytest.mark.parametrize(("rows", "tokens", "heads"), [(1, 2048, 12), (2, 40, 12), (1, 2048, 96)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=slow)])
def test_prefill_spills_nothing(build, rows, tokens, heads, dtype):
    # red with sums of decays by a product, which moves every operand to the product's layout; with eight warps
    built = build(rows, tokens, heads, dtype)
    assert [name for name in built.launches if name.startswith("kda")] == ["kda_chunks", "kda_carry"]
    assert len(built.launches) <= 14
    assert built.aliased == built.held
    for name in ("kda_chunks", "kda_carry"):
        kernel = built.kernels[name]
        assert kernel.spills == 0 and kernel.scratch == 0
        assert kernel.vgprs <= 512
    assert built.shared <= LDS
