"""The largest scores of a row by a tournament of blocks: exact, without sorting, atomics or a second reading.

A program holds a block of scores in registers as integers in their order, halves the interval that the cut lies in until as many as
are wanted lie above it, and writes those in order of position. A round leaves ``k`` of every block; rounds follow until one block
is left. With k = 2048 a block holds 16,384, so 1,048,576 scores take three rounds: of 64 blocks, 8 and one. Positions stay in
order all along, so of equal scores the smaller position is always the one that comes first.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kimi_jax.ops.launch import launch, load, span
from kimi_jax.ops.once import once

ROUND = 8
"""Entries of a block for each one that is kept."""

LARGEST, SMALLEST = 1 << 14, 1 << 10
"""Entries of a block: at most what 512 lanes hold in 32 registers each, and at least what is worth a launch."""

LANES = 2048
"""Entries of a block for each wavefront: 32 for a lane."""

NOTHING = -(1 << 31)
"""Below every key."""

MINUS_INFINITY = -0x7F800001
"""Key of -inf, which is never chosen."""

MOST = LARGEST // 2
"""Largest ``k``: a round must leave less than there was."""


@once
def top_k(
    scores: Float[Array, "*queries length"],
    positions: Int[Array, "*queries"] | None = None,
    *,
    k: int,
    interpret: bool = False,
) -> Int[Array, "*queries k"]:
    """See ``api.top_k``.

    Args:
      positions: of each query: that of its last candidate, -1 where it has none; scores behind it are not read.

    Raises:
      ValueError: more are wanted than a block can yield.
    """
    if k > MOST:
        raise ValueError(f"top_k of {k}: a kernel keeps at most {MOST}; nearest that works: {MOST}, or the reference")
    *queries, length = scores.shape
    if not scores.size:
        return jnp.full((*queries, k), -1, jnp.int32)
    positions = None if positions is None else positions.reshape(-1)
    held: tuple[Array, ...] = (scores.reshape(-1, length),)
    entries, block = [length], max(min(ROUND * pl.next_power_of_2(k), LARGEST), SMALLEST)
    while len(held) != 1 or len(entries) == 1:
        held = _round(held, positions, tuple(entries), block, k, interpret)
        entries.append(pl.cdiv(entries[-1], block) * k)
    return held[0].reshape(*queries, k)


def _round(
    held: tuple[Array, ...], positions: Array | None, entries: tuple[int, ...], block: int, k: int, interpret: bool
) -> tuple[Array, ...]:
    """``k`` of every block of what is held, in order; fewer are followed by -1.

    Args:
      held: scores, or keys and positions of the round before.
      entries: of a row, in this round and those before.

    Returns:
      Keys and positions, or positions alone after the last round.
    """
    first_round, parts = len(entries) == 1, pl.cdiv(entries[-1], block)
    last_round = parts == 1
    size = min(block, pl.next_power_of_2(entries[-1]))

    def kernel(held_ref: Any, positions_ref: Any, *out_ref: Any) -> None:
        query, part = pl.program_id(0), pl.program_id(1)
        end = jnp.int32(entries[0])
        if positions_ref is not None:
            end = jnp.minimum(positions_ref[query] + 1, end)
        for _ in entries[1:]:
            end = pl.cdiv(end, block) * k
        at = part * block + span(0, size)

        def select() -> None:
            key = load(held_ref[0], query, at, limits=(None, None), where=at < end)
            key = jnp.where(at < end, _ordered(key) if first_round else key, NOTHING)
            key = jnp.where(key > MINUS_INFINITY, key, NOTHING)
            found, slot, taken = _cut(key, k)
            position = at if first_round else load(held_ref[1], query, at, limits=(None, None), where=taken)
            # past the end where nothing is stored: interpreted, a masked store writes back what was there
            slot, rest = jnp.where(taken, part * k + slot, parts * k), span(0, pl.next_power_of_2(k))
            empty = (rest >= found) & (rest < k)
            for ref, value, nothing in zip(out_ref[::-1], (position, key), (-1, NOTHING), strict=False):
                plt.store(ref.at[query, slot], value, mask=taken)
                plt.store(ref.at[query, part * k + rest], jnp.full_like(rest, nothing), mask=empty)

        if last_round:
            select()
        else:
            # no later round reads what a block past the end would leave
            pl.when(part * block < end)(select)

    out = jax.ShapeDtypeStruct((held[0].shape[0], parts * k), jnp.int32)
    left = launch(
        kernel,
        "index_top_k",
        (held[0].shape[0], parts),
        out if last_round else (out, out),
        held,
        positions,
        interpret=interpret,
        warps=max(1, size // LANES),
    )
    return (left,) if last_round else left


def _ordered(score: Any) -> Any:
    """Signed integers in the order of the floats; -0.0 and 0.0 are one value."""
    bits = jax.lax.bitcast_convert_type(score, jnp.int32)
    # told by bits: what a device does with subnormal numbers or the sign of a zero plays no part
    bits = jnp.where(bits == NOTHING, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _cut(key: Any, k: int) -> tuple[Any, Any, Any]:
    """How many are chosen, at most ``k``; which place each one takes; and whether it is one of them. Inside a kernel."""
    real = key > NOTHING
    count = jnp.sum(real.astype(jnp.int32))
    low, high = jnp.min(jnp.where(real, key, 0x7FFFFFFF)), jnp.max(key)

    def halve(state: Any) -> Any:
        low, high = state
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without their sum
        above = jnp.sum((key >= middle).astype(jnp.int32))
        # exactly as many as wanted: it makes no difference where between two keys the cut lies
        return (
            jnp.where(above >= k, middle, low),
            jnp.where(above == k, middle, jnp.where(above > k, high, middle - 1)),
        )

    cut, _ = jax.lax.while_loop(lambda state: state[0] < state[1], halve, (low, jnp.where(count > k, high, low)))
    above, equal = key > cut, real & (key == cut)
    found = jnp.minimum(count, k)
    wanted = found - jnp.sum(above.astype(jnp.int32))
    # one scan for both: neither count reaches 2^15
    counts = jnp.cumsum(above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16))
    before = counts >> 16
    taken = above | (equal & (before <= wanted))
    return found, (counts & 0xFFFF) + jnp.minimum(before, wanted) - 1, taken
