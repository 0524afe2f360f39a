"""The kernels between the attention and the expert kernels, built for the MI355X at K3's sizes on one of eight devices."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from kimi_jax.ops.attn_res import pallas as attn_res
from kimi_jax.ops.linear import pair
from kimi_jax.ops.linear import pallas as linear
from kimi_jax.ops.linear.weights import Gated, Scaled
from kimi_jax.ops.sample import pallas as sampling

BFLOAT16, FLOAT32, FLOAT8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn

# every `(kernel,) = build(...)` is red when something beside the kernel is launched, such as a concatenation of weights


def project(x: Any, *weights: Any) -> Any:
    return linear.project([x], weights, dtypes=(BFLOAT16,) * len(weights), interpret=False)


def feed_forward_inputs(x: Any, router: Any, latent: Any, gate: Any, up: Any) -> Any:
    readers, dtypes = [router, latent, Gated(gate, up, 4.0, 25.0)], (FLOAT32, BFLOAT16, BFLOAT16)
    return linear.project([x], readers, dtypes=dtypes, interpret=False)


def beside(x: Any, left: Any, weight: Any) -> Any:
    return linear.project([x], [weight], left, dtypes=(BFLOAT16,), interpret=False)


def normed(x: Any, scale: Any, weight: Any) -> Any:
    return linear.project([x, scale], [weight], dtypes=(BFLOAT16,), eps=1e-5, interpret=False)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("function", "inner", "widths"),
    [
        pytest.param(project, 7168, (1536, 1536, 1536, 1536, 12, 128), id="kda"),
        pytest.param(project, 7168, (1536, 576, 1536), id="mla"),
        pytest.param(feed_forward_inputs, 7168, (896, 3584, 768, 768), id="feed forward"),
        pytest.param(project, 1536, (7168,), id="output"),
        pytest.param(project, 12288, (7168,), id="output on one device"),
    ],
)
def test_projections(build, rows, function, inner, widths):
    (kernel,) = build(function, ((rows, inner), BFLOAT16), *(((width, inner), BFLOAT16) for width in widths))
    assert (
        kernel.spills == 0 and kernel.scratch == 0
    )  # red with eight channels and all passes written out, or wider tiles
    assert kernel.vgprs <= 280  # one program of four warps fits on a compute unit at least; two by row


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_product_beside_the_routed_sum(build, rows):
    left = ((rows, 3584), FLOAT32)
    (kernel,) = build(beside, ((rows, 768), BFLOAT16), left, ((7168, 768), BFLOAT16))
    assert kernel.spills == 0 and kernel.scratch == 0


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("columns", "inner", "width"), [(3584 + 7168, 3584, 7168), (1536, 1536, 2304)])
def test_projections_of_a_norm(build, rows, columns, inner, width):
    shapes = (rows, columns), (1, inner), (width, inner)
    (kernel,) = build(normed, *((shape, BFLOAT16) for shape in shapes))
    assert kernel.spills == 0 and kernel.scratch == 0


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_end_of_experts_whose_latent_is_cut(build, rows):
    def run(x: Any, scale: Any, first: Any, up: Any, inner: Any, down: Any) -> Any:
        return pair.project_pair(x, scale, first, up, inner, down, eps=1e-5, interpret=False)

    norm, up = (((rows, 3584), BFLOAT16), ((3584,), BFLOAT16), ((1,), jnp.int32)), ((7168, 448), BFLOAT16)
    (kernel,) = build(run, *norm, up, ((rows, 768), BFLOAT16), ((7168, 768), BFLOAT16))
    assert kernel.spills == 0 and kernel.scratch == 0


def fp8_project(x: Any, *weights: Any) -> Any:
    scaled = [Scaled(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]
    return linear.project([x], scaled, dtypes=(BFLOAT16,) * len(scaled), interpret=False)


def fp8_feed_forward_inputs(x: Any, router: Any, latent: Any, *halves: Any) -> Any:
    gated = Gated(Scaled(*halves[:2]), Scaled(*halves[2:]), 4.0, 25.0)
    return linear.project([x], [router, latent, gated], dtypes=(FLOAT32, BFLOAT16, BFLOAT16), interpret=False)


def fp8_normed(x: Any, scale: Any, *weight: Any) -> Any:
    return linear.project([x, scale], [Scaled(*weight)], dtypes=(BFLOAT16,), eps=1e-5, interpret=False)


def fp8(inner: int, *widths: int) -> list[tuple[tuple[int, ...], Any]]:
    return [array for width in widths for array in (((width, inner), FLOAT8), ((width,), FLOAT32))]


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        pytest.param(fp8_project, [((7168,), BFLOAT16), *fp8(7168, 1536, 1536, 12, 128)], id="kda"),
        pytest.param(fp8_project, [((1536,), BFLOAT16), *fp8(1536, 7168)], id="output"),
        pytest.param(
            fp8_feed_forward_inputs,
            [((7168,), BFLOAT16), ((896, 7168), BFLOAT16), ((3584, 7168), BFLOAT16), *fp8(7168, 768, 768)],
            id="feed forward",
        ),
        pytest.param(fp8_normed, [((1536,), BFLOAT16), ((1, 1536), BFLOAT16), *fp8(1536, 2304)], id="norm"),
    ],
)
def test_fp8_projections(build, rows, function, arrays):
    # Red when a row is rounded in pieces that are all held at once, or codes are widened before their product.
    (columns, dtype), *weights = arrays
    kernels = build(function, ((rows, *columns), dtype), *weights)
    (kernel,) = [kernel for kernel in kernels if kernel.name == "project"]
    assert kernel.spills == 0 and kernel.scratch == 0
    assert kernel.vgprs <= 280
    assert rows > 1 or len(kernels) == 1  # a single row costs no launch besides the product


@pytest.mark.parametrize("blocks", [1, 8])
def test_mix_of_the_sources(build, blocks):
    def site(weight: Any, row: Any, scale: Any, prefix: Any, update: Any, *blocks: Any) -> Any:
        return attn_res.mix_norm(blocks, prefix, update, weight, row, scale, eps=1e-5, norm_eps=1e-5, interpret=False)

    rows = [((64, 7168), BFLOAT16)] * (blocks + 2)
    (kernel,) = build(site, *[((7168,), BFLOAT16)] * 3, *rows)
    assert kernel.spills == 0 and kernel.scratch == 0
    assert kernel.vgprs <= 256  # eight warps do not fit otherwise; sixteen are red (they spill on jax 0.12)


@pytest.mark.parametrize("width", [20480, 163840])
def test_the_greedy_draw(build, width):
    (look,) = build(partial(sampling.look, interpret=False), ((8, width), FLOAT32), ((width,), jnp.bool_))
    (merge,) = build(partial(sampling.merge, width=width, interpret=False), ((8, 8, 4), jnp.int32))
    assert look.spills == merge.spills == 0
    assert look.vgprs <= 128
