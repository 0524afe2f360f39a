"""Cases of the routed experts: their choice, and the weighted sum of what they make of a few tokens and of a chunk."""

from functools import partial
from typing import Any

import numpy as np

from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.moe import api
from kimi_jax.quant.mxfp4 import GROUP
from kimi_jax.testing.device_check.case import EQUAL, SUMMED, Case, Inputs, Outputs, Tolerance, normal, whole
from kimi_jax.testing.device_check.sizes import Sizes

BETA, LINEAR_BETA = 4.0, 25.0
OUT = Tolerance(
    2.0**-6, "rows, the activation and each expert's output are rounded to bfloat16; a rounding flips where sums differ"
)


def cases(sizes: Sizes) -> list[Case]:
    """All of them."""
    calls = {"decode-1": 1, "decode-batch": sizes.batch, "verify": sizes.draft, "prefill": sizes.chunk}
    made = [_experts(sizes, f"moe.experts/{name}", tokens) for name, tokens in calls.items()]
    return [*made, _route(sizes)]


def _experts(sizes: Sizes, name: str, tokens: int) -> Case:
    experts, top_k, latent, ffn = sizes.experts, sizes.top_k, sizes.expert_latent, sizes.ffn
    touched, dtype = min(experts, tokens * top_k), sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        return Inputs(
            (
                normal(random, tokens, latent, dtype=dtype),
                _chosen(random, tokens, experts, top_k),
                random.random((tokens, top_k), np.float32),
            )
        )

    def share() -> api.ExpertWeights:
        matrix = partial(_matrix, np.random.default_rng(0), experts)
        stored: Any = (*matrix(ffn, latent), *matrix(ffn, latent), *matrix(latent, ffn))
        return api.ExpertWeights(*stored)

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        z, ids, weights = inputs.own
        out = api.experts(z, ids, weights, inputs.shared, beta=BETA, linear_beta=LINEAR_BETA, impl=impl)
        return {"out": out}, {}

    weights = 3 * latent * ffn
    moved = touched * (weights // 2 + weights // GROUP) + tokens * latent * (dtype.itemsize + 4) + tokens * top_k * 8
    return Case(name, build, call, {"out": OUT.at(dtype)}, moved, 2 * tokens * top_k * weights, "bf16", share)


def _chosen(random: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray[Any, Any]:
    """Experts of each token. Few tokens share none, so that the bytes are known; many draw as they like and touch all."""
    if tokens * top_k <= experts:
        return random.permutation(experts)[: tokens * top_k].astype(np.int32).reshape(tokens, top_k)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


def _matrix(random: np.random.Generator, experts: int, out: int, inner: int) -> tuple[Any, Any]:
    """Packed codes and scale bytes; results of unit rows are about one."""
    middle = 127 + round(np.log2(0.5 / inner**0.5))
    packed = whole(random, 0, 256, experts, out, inner // 2)
    return packed, whole(random, middle - 2, middle + 3, experts, out, inner // GROUP)


def _route(sizes: Sizes) -> Case:
    tokens, experts, top_k = sizes.batch, sizes.experts, sizes.top_k

    def build(random: np.random.Generator) -> Inputs:
        logits = normal(random, tokens, experts, dtype=np.float32)
        return Inputs((logits, normal(random, experts, dtype=np.float32, scale=0.02), np.ones(tokens, bool)))

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        logits, bias, real = inputs.own
        ids, weights = api.route(logits, bias, top_k, renormalize=True, scale=1.0, real=real, impl=impl)
        return {"ids": ids, "weights": weights}, {}

    moved = tokens * experts * 4 + experts * 4 + tokens + tokens * top_k * 8
    flops = tokens * experts * 4
    return Case("moe.route/decode-batch", build, call, {"ids": EQUAL, "weights": SUMMED}, moved, flops, "fp32")
