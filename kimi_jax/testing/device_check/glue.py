"""Cases of what stands between attention and experts: projections of few rows, the mix of sources, the greedy draw."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.attn_res import api as attn_res
from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.linear import api as linear
from kimi_jax.ops.sample import api as sample
from kimi_jax.placement.collectives import Parallel
from kimi_jax.testing.device_check.case import EQUAL, ROUNDED, Case, Inputs, Outputs, Tolerance, near_one, normal
from kimi_jax.testing.device_check.sizes import Sizes

EPS = 1e-5
PROJECTIONS = ("q", "k", "v", "gate", "latent", "b")
LOGPROB = Tolerance(2e-5, "a sum of exponentials over the vocabulary in another order")


def cases(sizes: Sizes) -> list[Case]:
    """All of them."""
    rows = {"decode-1": 1, "decode-batch": sizes.batch, "verify": sizes.draft}
    mixed = {"decode-1": 1, "decode-batch": sizes.batch, "prefill": sizes.chunk}
    return [
        *(_projections(sizes, f"linear.project_many/kda-{name}", count) for name, count in rows.items()),
        *(_mix(sizes, f"attn_res.mix_norm/{name}", count) for name, count in mixed.items()),
        *(_draw(sizes, f"sample.greedy/{name}", rows[name]) for name in ("decode-1", "decode-batch")),
    ]


def _projections(sizes: Sizes, name: str, rows: int) -> Case:
    """Everything that a KDA layer projects its input to, in one launch."""
    embed, dtype = sizes.embed, sizes.dtype
    widths = (*[sizes.kda_width] * 4, sizes.decay_rank, sizes.kda_heads)

    def build(random: np.random.Generator) -> Inputs:
        weights = [normal(random, width, embed, dtype=dtype, scale=embed**-0.5) for width in widths]
        return Inputs((normal(random, rows, embed, dtype=dtype), weights))

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        x, weights = inputs.own
        return dict(zip(PROJECTIONS, linear.project_many(x, weights, impl=impl), strict=True)), {}

    moved = dtype.itemsize * (rows * embed + sum(widths) * embed + rows * sum(widths))
    tolerances: dict[str, Tolerance] = dict.fromkeys(PROJECTIONS, ROUNDED.at(dtype))
    return Case(name, build, call, tolerances, moved, 2 * rows * embed * sum(widths), "bf16")


def _mix(sizes: Sizes, name: str, tokens: int) -> Case:
    """One site of the attention residuals with all blocks finished."""
    embed, blocks, dtype = sizes.embed, sizes.blocks, sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        make = partial(normal, random, tokens, embed, dtype=dtype)
        weight, row, scale = (
            near_one(random, embed, dtype=dtype),
            normal(random, embed, dtype=dtype, scale=embed**-0.5),
            near_one(random, embed, dtype=dtype),
        )
        return Inputs(([make() for _ in range(blocks)], make(), make(), weight, row, scale))

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        sources, prefix, update, weight, row, scale = inputs.own
        out, summed = attn_res.mix_norm(sources, prefix, update, weight, row, EPS, scale, EPS, impl=impl)
        return {"out": out, "prefix": summed}, {}

    moved = dtype.itemsize * (tokens * embed * (blocks + 4) + 3 * embed)
    flops = tokens * embed * (6 * (blocks + 1) + 6)  # a source: two sums and the mix; then the norm
    twice = Tolerance(2 * ROUNDED.relative, "the mix is rounded before its norm, and the norm before its weight")
    return Case(name, build, call, {"out": twice.at(dtype), "prefix": EQUAL}, moved, flops, "fp32")


def _draw(sizes: Sizes, name: str, rows: int) -> Case:
    """The likeliest id of a slice."""
    vocab = sizes.vocab

    def build(random: np.random.Generator) -> Inputs:
        allowed = random.random(vocab) < 0.99
        return Inputs((normal(random, rows, vocab, dtype=np.float32, scale=3), allowed))

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        logits, allowed = inputs.own
        numbers, positions = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
        sampling = sample.Sampling(numbers, numbers + 1, positions, positions.astype(jnp.uint32))
        choice = sample.sample(logits, allowed, sampling, positions, Parallel.single(), random=False, impl=impl)
        return choice._asdict(), {}

    moved = rows * vocab * 4 + vocab + rows * 9
    tolerances = {"ids": EQUAL, "logprobs": LOGPROB, "finite": EQUAL}
    return Case(name, build, call, tolerances, moved, 4 * rows * vocab, "fp32")
