"""Cases of latent attention: few queries over short and long caches in two dtypes, a chunk of a prompt, the write of new rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_jax.cache import write_rows
from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.mla import api
from kimi_jax.ops.norm import rms_norm
from kimi_jax.testing.device_check.case import (
    BFLOAT16,
    FLOAT8,
    ROUNDED,
    Case,
    Inputs,
    Outputs,
    Tolerance,
    near_one,
    normal,
)
from kimi_jax.testing.device_check.sizes import Sizes

EPS = 1e-6
OUT = Tolerance(
    2.0**-5, "weights, sums of latents, values and the gate's factors are each rounded to bfloat16: 0.005 interpreted"
)


def cases(sizes: Sizes) -> list[Case]:
    """All of them."""
    calls = [
        ("decode-1", 1, 1, "short"),
        ("decode-1", 1, 1, "long"),
        ("decode-batch", sizes.batch, 1, "long"),
        ("verify", 1, sizes.draft, "long"),
    ]
    few = [
        _attend(sizes, f"mla.attend/{name}-{length}-{kind}", rows, tokens, getattr(sizes, length), held)
        for name, rows, tokens, length in calls
        for kind, held in (("bf16", BFLOAT16), ("fp8", FLOAT8))
    ]
    chunk = _attend(sizes, "mla.attend/prefill-short-bf16", 1, sizes.chunk, sizes.short, BFLOAT16)
    return [*few, chunk, _write(sizes)]


def _attend(sizes: Sizes, name: str, rows: int, tokens: int, length: int, held: Any) -> Case:
    """The last ``tokens`` of sequences that fill their cache."""
    heads, query_dim, expanded = sizes.heads, sizes.nope + sizes.rope, sizes.nope + sizes.value
    absorbed, dtype = tokens < api.DIRECT_FROM, sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        positions = length - tokens + np.arange(tokens, dtype=np.int32)
        return Inputs(
            (
                normal(random, rows, tokens, heads, query_dim, dtype=dtype),
                normal(random, rows, length, sizes.row, dtype=held),
                normal(random, heads * expanded, sizes.latent, dtype=dtype, scale=sizes.latent**-0.5),
                np.tile(positions, (rows, 1)),
                np.full(rows, length, np.int32),
                normal(random, rows, tokens, heads, sizes.value, dtype=dtype),
            )
        )

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        *given, gate = inputs.own
        form = "absorbed" if absorbed else "direct"
        return {"out": api.attend(*given, nope_dim=sizes.nope, gate=gate, form=form, impl=impl)}, {}

    queries = rows * tokens * heads
    moved = queries * (query_dim + 2 * sizes.value) * dtype.itemsize + heads * expanded * sizes.latent * dtype.itemsize
    moved += rows * length * sizes.row * np.dtype(held).itemsize + rows * tokens * 4 + rows * 4
    seen = rows * heads * sum(range(length - tokens + 1, length + 1))  # pairs of a query and a row it may see
    if absorbed:
        flops = 2 * seen * (sizes.row + sizes.latent) + 2 * queries * sizes.latent * expanded
    else:
        flops = 2 * seen * (query_dim + sizes.value) + 2 * rows * length * heads * expanded * sizes.latent
    return Case(name, build, call, {"out": OUT.at(dtype)}, moved, flops, "bf16")


@dataclass
class Norm:
    """The norm of a latent, as ``cache.write_rows`` takes it."""

    weight: Any
    eps: float

    def __call__(self, x: Any) -> Any:
        return rms_norm(x, self.weight, self.eps)


def _write(sizes: Sizes) -> Case:
    """The new row of every sequence of a batch, normalised and rounded, in place."""
    rows, tokens, length, dtype = sizes.batch, 1, sizes.short, sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        own = (
            normal(random, rows, tokens, sizes.row, dtype=dtype),
            np.full(rows, length - tokens, np.int32),
            np.full(rows, tokens, np.int32),
            near_one(random, sizes.latent, dtype=dtype),
        )
        return Inputs(own, {"latent": normal(random, rows, length, sizes.row, dtype=dtype)})

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        new, starts, counts, weight = inputs.own
        return {}, {
            "latent": write_rows(inputs.carried["latent"], new, starts, counts, norm=Norm(weight, EPS), impl=impl)
        }

    moved = (2 * rows * tokens * sizes.row + sizes.latent) * dtype.itemsize + 2 * rows * 4
    return Case(
        "mla.write/decode-batch",
        build,
        call,
        {"latent": ROUNDED.at(dtype)},
        moved,
        5 * rows * tokens * sizes.latent,
        "fp32",
    )
