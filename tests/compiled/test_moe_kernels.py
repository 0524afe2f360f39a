"""The kernels of the experts and of the router at the sizes of Kimi-K3, built for MI355X: registers, launches, instructions."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.ops.moe import api
from kimi_jax.ops.moe.weights import ExpertWeights
from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.codeobjects import Kernel, kernels_of
from kimi_jax.planning import compile as compiling

LATENT, TOP_K = 3584, 16
TP8, EP8 = (896, 384), (112, 3072)
"""Experts and their width on one device."""

LDS = 160 << 10
"""Bytes of local memory of a workgroup (AMD, CDNA4 instruction set architecture)."""

BFLOAT16_PRODUCT, SCALED_PRODUCT = r"cvt\.scalef32\.pk\.bf16\.fp4", r"mfma\.scale\.f32"


class Built(NamedTuple):
    """What the compiler made of a function; ``kernels`` by name, without those of earlier tests."""

    kernels: dict[str, Kernel]
    llvm: str
    launches: list[str]
    shared: list[int]
    temp: int


@pytest.fixture
def build(mi355x, tmp_path) -> Callable[..., Built]:
    mesh = Mesh(np.array(compile_only_devices(mi355x, 8)[:1]), ("one",))
    folder = compiling._kernel_folder()

    def run(function: Callable[..., Any], *shapes: Any) -> Built:
        whole = PartitionSpec()
        given = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, whole)), shapes
        )
        mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        before = set(folder.glob("*.hsaco"))
        options = {
            "xla_dump_to": str(tmp_path),
            "xla_dump_hlo_pass_re": "^$",
            "xla_dump_emitter_re": "^[^t]",
        }  # not the many stages of Triton
        with compiling._kernels_kept():
            compiled = jax.jit(mapped).lower(*given).compile(compiler_options=options)
        new = sorted(set(folder.glob("*.hsaco")) - before)
        thunks = sorted(tmp_path.glob("*thunk_sequence*.txt"))[-1].read_text()
        return Built(
            {kernel.name: kernel for path in new for kernel in kernels_of(path.read_bytes())},
            "".join(path.read_text() for path in tmp_path.glob("*.ll")),
            re.findall(r": kCustomKernel +\[.*?\] (\w+)", thunks),
            [int(size) for size in re.findall(r"shared_memory: (\d+)", thunks)],
            compiled.memory_analysis().temp_size_in_bytes,
        )

    return run


def operands(tokens: int, device: tuple[int, int], dtype: Any = jnp.bfloat16) -> list[Any]:
    """Abstract inputs of ``experts`` on one device."""
    experts, ffn = device
    byte = partial(jax.ShapeDtypeStruct, dtype=jnp.uint8)
    up = [byte((experts, ffn, LATENT // width)) for width in (2, 32)]
    w = ExpertWeights(*up, *up, *(byte((experts, LATENT, ffn // width)) for width in (2, 32)))
    pairs = (tokens, TOP_K)
    rows = [jax.ShapeDtypeStruct((tokens, LATENT), dtype)]
    return [*rows, jax.ShapeDtypeStruct(pairs, jnp.int32), jax.ShapeDtypeStruct(pairs, jnp.float32), w]


def experts(z, ids, weights, w, **options):
    first = jax.lax.axis_index("one") * w[0].shape[0]
    return api.experts(z, ids, weights, w, beta=4.0, linear_beta=25.0, first_expert=first, impl="pallas", **options)


def fits(built: Built, vgprs: int = 256) -> None:
    assert built.kernels
    for kernel in built.kernels.values():
        assert kernel.spills == 0, kernel
        assert kernel.scratch == 0, kernel
        assert kernel.vgprs <= vgprs, kernel  # 256: two wavefronts a SIMD
    assert max(built.shared) <= LDS


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("tokens", "device"),
    [(1, TP8), (8, EP8), *(pytest.param(*of, marks=slow) for of in [(8, TP8), (1, EP8), (64, TP8)])],
)
def test_few_tokens_take_two_launches(build, tokens, device):
    # Red when XLA has to sort or sum; when a tile grows past the registers; when weights are decoded by arithmetic.
    built = build(experts, *operands(tokens, device))
    assert [name for name in built.launches if name.startswith("moe")] == ["moe_up", "moe_down"]
    assert len(built.launches) <= 3  # and this rank's first expert
    fits(built)
    assert re.search(BFLOAT16_PRODUCT, built.llvm)
    assert built.temp <= tokens * TOP_K * device[1] * 2 + 4096  # the hidden rows


@pytest.mark.parametrize(
    ("tokens", "device", "sent"),
    [
        (1, TP8, True),
        (8, TP8, False),
        *(pytest.param(*of, marks=slow) for of in [(1, TP8, False), (8, TP8, True), (1, EP8, False), (8, EP8, False)]),
    ],
)
def test_two_launches_with_the_router(build, tokens, device, sent):
    # Red when scores of all tokens are held at once, when what was sent is put together by XLA, or the longer tile serves several.
    def run(asked, bias, real, w):
        first = jax.lax.axis_index("one") * w[0].shape[0]
        routing = {"top_k": TOP_K, "renormalize": True, "scale": 2.5, "beta": 4.0, "linear_beta": 25.0}
        return api.routed_experts(
            asked, bias, real, w, **routing, first_expert=first, dtype=jnp.bfloat16, impl="pallas"
        )

    array = jax.ShapeDtypeStruct
    asked = api.Asked(array((tokens, 896), jnp.float32), array((tokens, LATENT), jnp.bfloat16))
    if sent:
        asked = api.Sent(array((8, tokens, 2 * 112 + 448), jnp.uint16), 112, 448)
    built = build(run, asked, array((896,), jnp.float32), array((tokens,), jnp.bool_), operands(tokens, device)[3])
    assert [name for name in built.launches if name.startswith("moe")] == ["moe_route_up", "moe_down"]
    assert len(built.launches) <= 3  # and this rank's first expert
    fits(built, 256 if tokens > 1 else 320)  # of one token there are fewer programs than compute units
    assert built.temp <= tokens * TOP_K * (device[1] * 2 + 8) + 4096  # the hidden rows and the choice


@pytest.mark.parametrize(
    ("tokens", "device", "most"), [(2048, TP8, 64), (512, TP8, 16), pytest.param(2048, EP8, 240, marks=slow)]
)
def test_a_chunk(build, tokens, device, most):
    # Red when the outputs of all pairs are held at full width (235 MB), or when XLA has to sort or sum.
    built = build(experts, *operands(tokens, device))
    ours = [name.partition("__")[0] for name in built.launches if name.startswith("moe")]
    assert ours == ["moe_group", "moe_up_tiles", *["moe_down_tiles", "moe_sum"] * 7]
    assert len(built.launches) <= len(ours) + 1  # this rank's first expert; zeros to add to would be another
    fits(built)
    assert re.search(BFLOAT16_PRODUCT, built.llvm)
    assert built.temp <= most * 1_000_000


def test_fp8_rows_meet_the_codes_themselves(build):
    # Red when the scales of the rows are not passed, or another chip is described to the compiler.
    built = build(partial(experts, product="fp8"), *operands(8, TP8))
    fits(built)
    assert re.search(SCALED_PRODUCT, built.llvm)


@slow
@pytest.mark.parametrize(("dtype", "vgprs"), [("bfloat16", 320), ("float32", 360)])
def test_weights_decoded_by_arithmetic(build, dtype, vgprs):
    # Red when the way without the private hook no longer builds.
    built = build(partial(experts, product="decoded"), *operands(8, TP8, jnp.dtype(dtype)))
    assert max(kernel.spills for kernel in built.kernels.values()) == 0
    assert max(kernel.vgprs for kernel in built.kernels.values()) <= vgprs
    assert max(built.shared) <= LDS
    assert not re.search(BFLOAT16_PRODUCT, built.llvm)


def test_the_router_is_one_launch(build):
    # Red when the choice is left to XLA's sort.
    def route(logits, bias, real):
        return api.route(logits, bias, TOP_K, renormalize=True, scale=1.0, real=real, impl="pallas")

    shapes = [((8, 896), jnp.float32), ((896,), jnp.float32), ((8,), jnp.bool_)]
    built = build(route, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert built.launches == ["moe_route"]
    fits(built)
