"""One launch a site: the running sum takes the last update in, all sources are mixed, the result is normalised.

A program holds all sources of one token in registers, so every source is read once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from kimi_jax.ops.once import once

LANE = 8
"""Values of a source that a lane reads at once: 16 bytes."""


@once
def mix_norm(
    blocks: Sequence[Float[Array, "*tokens embed"]],
    prefix: Float[Array, "*tokens embed"],
    update: Float[Array, "*tokens embed"] | None,
    weight: Float[Array, " embed"],
    row: Float[Array, " embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
    norm_eps: float,
    interpret: bool,
) -> tuple[Float[Array, "*tokens embed"], Float[Array, "*tokens embed"]]:
    """See ``api.mix_norm``."""
    embed, dtype = prefix.shape[-1], prefix.dtype
    width = max(LANE, pl.next_power_of_2(embed))
    sources = [source.reshape(-1, embed) for source in (*blocks, prefix, *(() if update is None else (update,)))]
    rows = jax.ShapeDtypeStruct(sources[0].shape, dtype)

    def kernel(*refs: Any) -> None:
        *given, weight_ref, row_ref, scale_ref, out_ref = refs[: len(sources) + 4]
        at_d = jnp.arange(width)
        here = (pl.program_id(0), at_d)
        inside = None if width == embed else at_d < embed
        load = lambda at: plt.load(at, mask=inside, other=None if inside is None else 0)  # noqa: E731

        values = [load(ref.at[here]) for ref in given]
        if update is not None:
            added = values.pop()
            values[-1] += added
            plt.store(refs[-1].at[here], values[-1], mask=inside)
        values = [value.astype(jnp.float32) for value in values]
        query_d = load(weight_ref.at[at_d]).astype(jnp.float32) * load(row_ref.at[at_d]).astype(jnp.float32)
        weights_s = _weights(
            _sums([value * query_d for value in values]), _sums([value**2 for value in values]) / embed
        )
        mixed_d = sum(_entry(weights_s, index) * value for index, value in enumerate(values))
        wide_d = jnp.asarray(mixed_d).astype(dtype).astype(jnp.float32)
        normal_d = wide_d * jax.lax.rsqrt(jnp.sum(wide_d**2) / embed + norm_eps)
        plt.store(out_ref.at[here], normal_d.astype(dtype) * load(scale_ref.at[at_d]).astype(dtype), mask=inside)

    def _weights(dots_s: Any, squares_s: Any) -> Any:
        """Softmax over the sources; the entries of the padding are zero."""
        score_s = dots_s * jax.lax.rsqrt(squares_s + eps)
        score_s = jnp.where(jnp.arange(score_s.size) < len(blocks) + 1, score_s, -jnp.inf)
        raised_s = jnp.exp(score_s - jnp.max(score_s))
        return raised_s / jnp.sum(raised_s)

    # sixteen warps would share the registers that eight sources and the running sum need (jax 0.12 then spills)
    warps = max(1, min(8, width // (64 * LANE)))
    params = None if interpret else plt.CompilerParams(num_warps=warps, num_stages=1)
    out, *summed = pl.pallas_call(
        kernel,
        grid=rows.shape[:1],
        out_shape=[rows] if update is None else [rows, rows],
        interpret=interpret,
        name="mix_norm",
        compiler_params=params,
    )(*sources, weight, row, scale)
    return out.reshape(prefix.shape), summed[0].reshape(prefix.shape) if summed else prefix


def _sums(parts: Sequence[Any]) -> Any:
    """The sum of each part, in one vector padded to a power of two: one exchange between warps for all of them."""
    lanes = [jnp.sum(part.reshape(-1, LANE), axis=1) for part in parts]
    count = pl.next_power_of_2(len(lanes))
    lanes += [jnp.zeros_like(lanes[0])] * (count - len(lanes))
    while len(lanes) > 1:  # Triton joins two values along a new last axis, nothing else
        half = len(lanes) // 2
        lanes = [jnp.stack(pair, axis=-1) for pair in zip(lanes[:half], lanes[half:], strict=True)]
    return jnp.sum(lanes[0].reshape(-1, count), axis=0)


def _entry(vector: Any, index: int) -> Any:
    """One entry of a value, which Triton cannot index."""
    return jnp.sum(jnp.where(jnp.arange(vector.size) == index, vector, 0))
