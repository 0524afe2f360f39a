"""What a request may ask besides temperature, top-k and top-p; every field has a value that changes nothing."""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

BIAS = 300
"""Ids of one row whose logits may be shifted; a fixed width keeps one compiled program for all requests."""


class Extras(NamedTuple):
    """Arrays of one entry per row.

    Attributes:
      min_p: keep ids at least this likely relative to the likeliest; 0 keeps everything.
      presence: taken off the logits of ids that were drawn before; 0 for none.
      frequency: the same, for every time they were drawn.
      repetition: logits of ids in the prompt or drawn before are divided by it where positive, else multiplied; 1 for none.
      bias_ids: ids whose logits are shifted, -1 in unused places; no id twice.
      bias: by how much.
      mask: bit ``i % 32`` of word ``i // 32`` says whether id ``i`` may be drawn; the whole vocabulary on every device.
    """

    min_p: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    bias_ids: Int[Array, "rows bias"]
    bias: Float[Array, "rows bias"]
    mask: UInt32[Array, "rows words"]


class Seen(NamedTuple):
    """What penalties count from: this device's slice of the vocabulary.

    Attributes:
      prompt: ids that stand in the prompt.
      drawn: how often an id was drawn.
    """

    prompt: Bool[Array, "rows local_vocab"]
    drawn: Int[Array, "rows local_vocab"]


def neutral(rows: int, vocab: int) -> Extras:
    """Extras that change nothing, as host arrays."""
    none: Any = np.zeros(rows, np.float32)
    ids, bias = np.full((rows, BIAS), -1, np.int32), np.zeros((rows, BIAS), np.float32)
    mask = np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    return Extras(none, none, none, none + 1, cast(Any, ids), cast(Any, bias), cast(Any, mask))


def biased(
    logits: Float[Array, "rows local_vocab"], extras: Extras, offset: Int[Array, ""] | int
) -> Float[Array, "rows local_vocab"]:
    """Logits with the bias added; ``offset`` is the first id of the slice."""
    rows, width = logits.shape
    local = extras.bias_ids - offset
    here = (extras.bias_ids >= 0) & (local >= 0) & (local < width)
    # out of range is dropped; a negative index would count from the end
    return logits.at[jnp.arange(rows)[:, None], jnp.where(here, local, width)].add(extras.bias, mode="drop")


def penalised(logits: Float[Array, "rows local_vocab"], extras: Extras, seen: Seen) -> Float[Array, "rows local_vocab"]:
    """Logits with the repetition penalty, then frequency and presence taken off: vLLM's order."""
    repetition = extras.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen.prompt | (seen.drawn > 0), repeated, logits)
    logits = logits - extras.frequency[:, None] * seen.drawn
    return logits - extras.presence[:, None] * (seen.drawn > 0)


def unmasked(
    mask: UInt32[Array, "rows words"], offset: Int[Array, ""] | int, width: int
) -> Bool[Array, "rows local_vocab"]:
    """Which ids ``offset .. offset + width - 1`` the mask lets through."""
    ids = offset + jnp.arange(width)
    return (mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32)) & 1 > 0


def book(
    drawn: Int[Array, "rows local_vocab"],
    rows: Int[Array, " n"],
    ids: Int[Array, " n"],
    emitted: Bool[Array, " n"],
    offset: Int[Array, ""] | int,
) -> Int[Array, "rows local_vocab"]:
    """Counts one drawn id for each of some rows, where it was ``emitted``."""
    width, local = drawn.shape[1], ids - offset
    here = emitted & (local >= 0) & (local < width)
    return drawn.at[rows, jnp.where(here, local, width)].add(1, mode="drop")
