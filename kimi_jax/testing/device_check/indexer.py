"""Cases of K3.1 Pro's sparse attention: scores of a few queries over many keys in three formats, the choice, the chosen rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.indexer import api
from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.mla import sparse
from kimi_jax.testing.device_check.case import (
    BFLOAT16,
    EQUAL,
    FLOAT8,
    SUMMED,
    Case,
    Inputs,
    Outputs,
    normal,
    whole,
)
from kimi_jax.testing.device_check.mla import OUT
from kimi_jax.testing.device_check.sizes import Sizes

GROUP = 32
"""Channels that share a scale byte in MXFP4."""


def cases(sizes: Sizes) -> list[Case]:
    """All of them."""
    fp8 = [
        _scores(sizes, f"indexer.scores/{name}-fp8", *call, "fp8")
        for name, call in {
            "decode-1-long": (1, 1, sizes.long),
            "decode-batch-long": (sizes.batch, 1, sizes.long),
            "verify-long": (1, sizes.draft, sizes.long),
            "prefill-short": (1, sizes.chunk, sizes.short),
        }.items()
    ]
    others = [
        _scores(sizes, f"indexer.scores/decode-1-long-{form}", 1, 1, sizes.long, form) for form in ("bf16", "mxfp4")
    ]
    chosen = [
        _top_k(sizes, f"indexer.top_k/{name}", *call)
        for name, call in {
            "decode-1-long": (1, sizes.long),
            "decode-batch-long": (sizes.batch, sizes.long),
            "prefill-short": (sizes.chunk, sizes.short),
        }.items()
    ]
    attended = [
        _attend(sizes, f"mla.attend_selected/{name}", *call)
        for name, call in {
            "decode-1-long-bf16": (1, 1, BFLOAT16),
            "decode-1-long-fp8": (1, 1, FLOAT8),
            "decode-batch-long-fp8": (sizes.batch, 1, FLOAT8),
            "prefill-long-fp8": (1, sizes.chunk, FLOAT8),
        }.items()
    ]
    return [*fp8, *others, *chosen, *attended]


FORMS: dict[str, Callable[..., IndexCache]] = {
    "bf16": lambda random, width, *held: IndexCache(normal(random, *held, width, dtype=BFLOAT16)),
    "fp8": lambda random, width, *held: IndexCache(
        normal(random, *held, width, dtype=FLOAT8),
        (2.0 ** whole(random, 0, 4, *held).astype(np.int32)).astype(np.float32),
    ),
    "mxfp4": lambda random, width, *held: IndexCache(
        whole(random, 0, 256, *held, width // 2), whole(random, 125, 129, *held, width // GROUP)
    ),
}
"""Key format -> keys of many tokens."""


def _scores(sizes: Sizes, name: str, rows: int, tokens: int, length: int, form: str) -> Case:
    """The last ``tokens`` of sequences that fill their cache."""
    heads, width, dtype = sizes.index_heads, sizes.index_dim, sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        positions = length - tokens + np.arange(tokens, dtype=np.int32)
        return Inputs(
            (
                normal(random, rows, tokens, heads, width, dtype=dtype),
                normal(random, rows, tokens, heads, dtype=np.float32, scale=(heads * width) ** -0.5),
                FORMS[form](random, width, rows, length),
                np.tile(positions, (rows, 1)),
            )
        )

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        return {"scores": api.scores(*inputs.own, impl=impl)}, {}

    of_key = {"bf16": 2 * width, "fp8": width + 4, "mxfp4": width // 2 + width // GROUP}[form]
    queries = rows * tokens
    moved = queries * (heads * (width * dtype.itemsize + 4) + 4 + 4 * length) + rows * length * of_key
    seen = rows * sum(range(length - tokens + 1, length + 1))  # pairs of a query and a key it may see
    return Case(name, build, call, {"scores": SUMMED}, moved, 2 * seen * heads * width, "bf16")


def _top_k(sizes: Sizes, name: str, queries: int, length: int) -> Case:
    k = sizes.index_top_k

    def build(random: np.random.Generator) -> Inputs:
        # rounded, so that ties lie at the cut
        return Inputs(np.round(normal(random, queries, length, dtype=np.float32), 2))

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        return {"chosen": api.top_k(inputs.own, k, impl)}, {}

    return Case(name, build, call, {"chosen": EQUAL}, queries * 4 * (length + k), queries * length, "fp32")


def _attend(sizes: Sizes, name: str, rows: int, tokens: int, held: Any) -> Case:
    """Every token chooses at random out of a long sequence; other copies of a case choose others."""
    heads, query_dim, expanded, k = sizes.heads, sizes.nope + sizes.rope, sizes.nope + sizes.value, sizes.index_top_k
    dtype = sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        step = sizes.long // k
        first = np.arange(k, dtype=np.int32) * step
        return Inputs(
            (
                normal(random, rows, tokens, heads, query_dim, dtype=dtype),
                normal(random, heads * expanded, sizes.latent, dtype=dtype, scale=sizes.latent**-0.5),
                first + random.integers(0, step, (rows, tokens, k), np.int32),
                normal(random, rows, tokens, heads, sizes.value, dtype=dtype),
            )
        )

    def share() -> Any:
        return normal(np.random.default_rng(0), rows, sizes.long, sizes.row, dtype=held)

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        query, expand, chosen, gate = inputs.own
        run = sparse.attend_selected
        return {"out": run(query, inputs.shared, expand, chosen, nope_dim=sizes.nope, gate=gate, impl=impl)}, {}

    queries = rows * tokens * heads
    moved = queries * (query_dim + 2 * sizes.value) * dtype.itemsize + heads * expanded * sizes.latent * dtype.itemsize
    moved += rows * min(tokens * k, sizes.long) * sizes.row * np.dtype(held).itemsize + rows * tokens * k * 4
    flops = 2 * queries * (k * (sizes.row + sizes.latent) + sizes.latent * expanded)
    return Case(name, build, call, {"out": OUT.at(dtype)}, moved, flops, "bf16", share)
