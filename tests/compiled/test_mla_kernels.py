"""The kernels of latent attention at the sizes of Kimi-K3 under tp8, built for an MI355X: 12 heads, a million cached rows."""

import re
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.cache import write_rows
from kimi_jax.ops.mla import api
from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.codeobjects import Kernel, read_kernels
from kimi_jax.placement.device import load_device
from kimi_jax.planning import compile as compiling

HEADS, NOPE, SHARED, VALUE, LATENT, CONTEXT = 12, 128, 64, 128, 512, 1 << 20
BFLOAT16, FLOAT32, FLOAT8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
LDS = 160 * 1024
"""Local memory of a compute unit (sharding/devices/mi355x.toml)."""


class Built(NamedTuple):
    """What came out: what is launched, outside of loops and in them; most local memory; bytes; kernels not built before."""

    launches: list[str]
    looped: list[str]
    lds: int
    temp: int
    aliased: int
    kernels: set[Kernel]


@cache
def core(rows: int, tokens: int, latent: Any, operand: Any = BFLOAT16, page: int | None = None) -> Built:
    """Cache write, attention and gate of one layer; in pages of ``page`` rows where given."""
    mesh = Mesh(np.array(compile_only_devices(load_device("mi355x"), 8)[:1]), ("one",))

    def run(cache: Any, new: Any, norm: Any, query: Any, expand: Any, gate: Any, at: Any, table: Any) -> Any:
        positions, starts, counts, lengths = at
        if api.absorbs_early(tokens, "pallas"):
            rows = api.NewRows(new, starts, counts, norm)
            query, cache = api.absorb_and_write(
                cache, query, expand, rows, nope_dim=NOPE, eps=1e-6, pages=table, impl="pallas"
            )
        else:
            held = SimpleNamespace(weight=norm, eps=1e-6)
            cache = write_rows(cache, new, starts, counts, norm=held, pages=table, impl="pallas")
        out = api.attend(query, cache, expand, positions, lengths, nope_dim=NOPE, gate=gate, pages=table, impl="pallas")
        return cache, out

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    row, grid = array(jnp.int32, rows), array(jnp.int32, rows, tokens)
    width = LATENT + SHARED
    given = (
        array(latent, rows, CONTEXT, width) if page is None else array(latent, rows * CONTEXT // page, page, width),
        array(operand, rows, tokens, width),
        array(operand, LATENT),
        array(operand, rows, tokens, HEADS, NOPE + SHARED),
        array(operand, HEADS * (NOPE + VALUE), LATENT),
        array(operand, rows, tokens, HEADS, VALUE),
        (grid, row, row, row),
        None if page is None else array(jnp.int32, rows, CONTEXT // page),
    )
    spec = PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    before = set(read_kernels(compiling._kernel_files()))
    with tempfile.TemporaryDirectory() as folder, compiling._kernels_kept():
        program = jax.jit(mapped, donate_argnums=0).lower(*given).compile(compiler_options=compiling._options(folder))
        # no pass changes the sequence of so small a program, so only the first is written
        (written,) = Path(folder).glob("*thunk_sequence.txt")
        thunks = written.read_text()
    memory = program.memory_analysis()
    launches = re.findall(r"^( *)\d+: kC\w+ .*?\] +(\w+)", thunks, re.MULTILINE)
    return Built(
        [name for indent, name in launches if not indent],
        [name for indent, name in launches if indent],
        max(int(size) for size in re.findall(r"shared_memory: (\d+) bytes", thunks)),
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        set(read_kernels(compiling._kernel_files())) - before,
    )


DECODE = [(1, 1, BFLOAT16), (8, 1, BFLOAT16), (1, 1, FLOAT8), (8, 1, FLOAT8), (1, 8, BFLOAT16), (8, 8, FLOAT8)]


@pytest.mark.parametrize(("rows", "tokens", "latent"), DECODE)
def test_decoding_is_three_launches_that_fit(mi355x, rows, tokens, latent):
    built = core(rows, tokens, latent)
    # red when a weight is sliced, a table computed or the gate applied outside of a kernel
    assert sorted(built.launches) == ["mla_absorb_write", "mla_attend", "mla_merge_expand"] and not built.looped
    assert built.aliased == rows * CONTEXT * (LATENT + SHARED) * jnp.dtype(latent).itemsize  # red without the alias
    assert built.temp < 70e6  # at most 1,024 shares' results; red when cached rows are gathered or widened: 600 MB
    fits(built)


@pytest.mark.parametrize("latent", [BFLOAT16, FLOAT8])
def test_a_chunk_of_a_prompt(mi355x, latent):
    built = core(1, 2048, latent)
    assert [name for name in built.launches if name.startswith("mla")] == [
        "mla_write",
        "mla_expand",
        "mla_attend_block",
    ]
    assert [name.rstrip("_1") for name in built.looped if name.startswith("mla")] == ["mla_expand", "mla_attend_block"]
    assert built.temp < 40e6  # one block of keys and values, and the running results: red when either is copied
    fits(built)


@pytest.mark.parametrize("tokens", [1, 2048])
def test_float32_is_built_too(mi355x, tokens):
    # at this size it spills: the exact mode is for comparisons, with models small enough to hold it
    assert core(1, tokens, FLOAT32, FLOAT32).lds <= LDS


@pytest.mark.parametrize("tokens", [1, 2048])
def test_pages(mi355x, tokens):
    built = core(8, tokens, FLOAT8, page=64)
    assert built.temp < 200e6  # of 4.8 GB of cached rows; red when they are gathered
    fits(built)


@pytest.mark.parametrize("rows", [1, 8])
def test_queries_are_projected_too(mi355x, build, rows):
    def run(cache: Any, latent: Any, norm: Any, weight: Any, expand: Any, new: Any, starts: Any) -> Any:
        query, fresh = api.Latents(latent, norm, weight), api.NewRows(new, starts, starts, norm[:LATENT])
        eps = {"query_eps": 1e-6, "eps": 1e-6}
        return api.project_absorb_and_write(cache, query, expand, fresh, nope_dim=NOPE, **eps, impl="pallas")

    width, rank = LATENT + SHARED, 1536
    given = (
        (rows, 4096, width),
        (rows, 1, rank),
        (rank,),
        (HEADS * (NOPE + SHARED), rank),
        (HEADS * (NOPE + VALUE), LATENT),
    )
    kernels = build(run, *((shape, BFLOAT16) for shape in (*given, (rows, 1, width))), ((rows,), jnp.int32))
    (kernel,) = (kernel for kernel in kernels if kernel.name.startswith("mla"))  # the cache is not donated: a copy
    assert (kernel.name, kernel.spills, kernel.scratch) == ("mla_enter", 0, 0)
    assert kernel.vgprs <= 256  # red with passes of 512 over 128 columns, where the next tile is loaded ahead


def fits(built: Built) -> None:
    """No register spills, and local memory suffices; red with 64 queries a program, or 8 tokens in the merge."""
    assert built.lds <= LDS
    assert [(kernel.name, kernel.spills, kernel.scratch) for kernel in built.kernels if kernel.spills] == []
    assert all(kernel.vgprs <= 512 and "gfx950" in kernel.target for kernel in built.kernels)
