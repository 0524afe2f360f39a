"""Cases of Kimi Delta Attention: everything between its projections and its output projection."""

from functools import partial
from typing import Any

import numpy as np

from kimi_jax.ops.implementation import Impl
from kimi_jax.ops.kda import api
from kimi_jax.testing.device_check.case import EQUAL, SUMMED, Case, Inputs, Outputs, Tolerance, near_one, normal
from kimi_jax.testing.device_check.sizes import Sizes

BOUND = -5.0
EPS = 1e-5
OUT = Tolerance(
    2.0**-6, "rounded to bfloat16 before and after the gate; a flipped rounding is doubled by the norm's weight"
)
CHUNKED = Tolerance(5e-4, "products of a chunk multiply operands split in two bfloat16: 1e-4 of the state, interpreted")


def cases(sizes: Sizes) -> list[Case]:
    """A step, a batch of steps, a verification and a chunk."""
    calls = {
        "decode-1": (1, 1),
        "decode-batch": (sizes.batch, 1),
        "verify": (1, sizes.draft),
        "prefill": (1, sizes.chunk),
    }
    return [_attend(sizes, f"kda.attend/{name}", *call) for name, call in calls.items()]


def _attend(sizes: Sizes, name: str, rows: int, tokens: int) -> Case:
    heads, dim, rank, taps, width = sizes.kda_heads, sizes.kda_dim, sizes.decay_rank, sizes.taps, sizes.kda_width
    dtype = sizes.dtype

    def build(random: np.random.Generator) -> Inputs:
        wide = partial(normal, random, rows, tokens, dtype=dtype)
        filters = partial(normal, random, width, 1, taps, dtype=np.float32, scale=0.5)
        projected: Any = (*(wide(width) for _ in range(4)), wide(rank), wide(heads))
        weights: Any = (
            *(filters() for _ in range(3)),
            normal(random, width, rank, dtype=dtype, scale=rank**-0.5),
            normal(random, heads, dtype=np.float32, scale=0.5),
            normal(random, heads, dim, dtype=np.float32) - 2,
            near_one(random, dim, dtype=np.float32),
        )
        carried = {
            "windows": normal(random, rows, 3, taps - 1, width, dtype=dtype),
            "state": normal(random, rows, heads, dim, dim, dtype=np.float32, scale=dim**-0.5),
        }
        lengths = np.full(rows, tokens, np.int32)
        return Inputs((api.Projected(*projected), api.Weights(*weights), lengths), carried)

    def call(impl: Impl, inputs: Inputs) -> Outputs:
        projected, weights, lengths = inputs.own
        windows, state = inputs.carried["windows"], inputs.carried["state"]
        out, windows, state = api.attend(
            projected, weights, windows, state, lengths, lower_bound=BOUND, eps=EPS, impl=impl
        )
        return {"out": out}, {"windows": windows, "state": state}

    moved = rows * tokens * (5 * width + rank + heads) * dtype.itemsize
    moved += (3 * width * taps + heads + width + dim) * 4 + width * rank * dtype.itemsize + rows * 4
    moved += 2 * rows * (3 * (taps - 1) * width * dtype.itemsize + heads * dim * dim * 4)
    # token by token: decay, what the state holds of the key, its update, what it holds of the query; the decay's latent
    flops = rows * tokens * heads * (7 * dim * dim + 2 * dim * rank)
    chunked = tokens > 8
    state = CHUNKED if chunked else SUMMED
    tolerances = {"out": OUT.at(dtype), "windows": EQUAL, "state": state.at(dtype)}
    return Case(name, build, call, tolerances, moved, flops, "bf16" if chunked else "fp32")
