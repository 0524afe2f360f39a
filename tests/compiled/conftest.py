"""The compile-only target, or a printed reason why it cannot be had here."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.codeobjects import Kernel, kernels_of
from kimi_jax.placement.device import load_device
from kimi_jax.placement.rocm.problem import TargetError
from kimi_jax.planning import compile as compiling


@pytest.fixture(scope="session")
def mi355x():
    """Eight compile-only MI355X; the first use fetches the compiler (about 150 MB) into the cache folder."""
    device = load_device("mi355x")
    try:
        compile_only_devices(device, 8)
    except TargetError as reason:
        pytest.skip(str(reason))
    return device


@pytest.fixture(scope="session")
def build(mi355x) -> Callable[..., list[Kernel]]:
    """``build(function, *(shape, dtype))``: the kernels of a function, those built before in this process left out."""
    mesh = Mesh(np.array(compile_only_devices(mi355x, 8)[:1]), ("one",))
    whole = PartitionSpec()
    # the compiler reads where to leave kernels once in a process
    folder = compiling._kernel_folder()

    def run(function: Callable[..., Any], *arrays: tuple[tuple[int, ...], Any]) -> list[Kernel]:
        given = [jax.ShapeDtypeStruct(*array, sharding=NamedSharding(mesh, whole)) for array in arrays]
        mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        before = set(folder.glob("*.hsaco"))
        with compiling._kernels_kept():
            jax.jit(mapped).lower(*given).compile()
        new = sorted(set(folder.glob("*.hsaco")) - before)
        return [kernel for path in new for kernel in kernels_of(path.read_bytes())]

    return run
