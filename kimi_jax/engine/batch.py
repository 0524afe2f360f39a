"""The small host arrays that a call of the slot programs takes: one row per prompt piece, or one per slot."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from jaxtyping import Array

from kimi_jax.draft.slot_steps import PLAIN
from kimi_jax.engine.request import MAX_STOPS, Request
from kimi_jax.engine.sequence import Sequence
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.loop import RUNNING, STOPPED, Limits, Rows
from kimi_jax.media.prompt import Chunk, call_rows, chunk_rows
from kimi_jax.ops.sample.api import GREEDY_BELOW, Sampling
from kimi_jax.ops.sample.extras import Extras
from kimi_jax.slots import Kind, PrefillCall

Placed = Mapping[int, Sequence]
"""Row of a call -> its request; other rows idle."""


def kind_of(requests: Iterable[Request]) -> Kind:
    """The least program that serves all of some requests."""
    kind: Kind = "greedy"
    for request in requests:
        if request.extras:
            return "full"
        if request.temperature >= GREEDY_BELOW:
            kind = "random"
    return kind


def prefill_call(placed: Placed, rows: int, width: int, table: int, chunk: int) -> PrefillCall:
    """The next piece of every prompt."""
    call = PrefillCall(
        *map(
            _host,
            (
                np.full(rows, -1, np.int32),
                np.zeros((rows, width), np.int32),
                np.zeros(rows, np.int32),
                np.zeros(rows, np.int32),
                np.full((rows, table), -1, np.int32),
                np.zeros(rows, bool),
                np.zeros(rows, np.int32),
            ),
        )
    )
    arrays = cast(Any, call)
    for row, sequence in placed.items():
        start, new = sequence.position, sequence.piece(chunk)
        arrays.slots[row] = sequence.slot
        arrays.ids[row, :new] = sequence.ids[start : start + new]
        arrays.start[row], arrays.new[row] = start, new
        arrays.tables[row, : len(sequence.pages)] = sequence.pages
        arrays.last[row] = start + new == len(sequence.ids)
        arrays.budget[row] = sequence.budget
    return call


def image_rows(placed: Placed, rows: int, width: int, chunk: int, dtype: np.dtype[Any]) -> ImageRows | None:
    """What images put into the next pieces, in the dtype of activations; None where those hold no part of any."""
    chunks: list[Chunk | None] = [None] * rows
    for row, sequence in placed.items():
        given = [image.rows for image in sequence.request.images]
        chunks[row] = chunk_rows(sequence.spans, given, sequence.position, sequence.piece(chunk))
    found = call_rows(chunks, width)
    if found is None:
        return None
    values, here = found
    return ImageRows(_host(values.astype(dtype, copy=False)), _host(here))


def decode_rows(placed: Placed, slots: int, table: int) -> tuple[np.ndarray[Any, Any], Rows]:
    """Page tables and state of all slots; a slot without a decoding request idles."""
    tables = np.full((slots, table), -1, np.int32)
    token, position, budget = (np.zeros(slots, np.int32) for _ in range(3))
    status = np.full(slots, STOPPED, np.int32)
    for slot, sequence in placed.items():
        tables[slot, : len(sequence.pages)] = sequence.pages
        token[slot], position[slot], budget[slot] = sequence.ids[-1], sequence.position, sequence.budget
        status[slot] = RUNNING
    return tables, Rows(*map(_host, (token, position, budget, status)))


def drafts_of(placed: Placed, slots: int) -> Array:
    """Drafts that each slot may have verified; PLAIN where a request has none."""
    drafts = np.full(slots, PLAIN, np.int32)
    for slot, sequence in placed.items():
        if sequence.stride > 1:
            drafts[slot] = sequence.stride - 1
    return _host(drafts)


def sampling_of(placed: Placed, rows: int) -> Sampling:
    """How each row draws."""

    def column(dtype: Any, fill: float, read: Callable[[Request], Any]) -> Array:
        values = np.full(rows, fill, dtype)
        for row, sequence in placed.items():
            values[row] = read(sequence.request)
        return _host(values)

    return Sampling(
        column(np.float32, 0, lambda r: r.temperature),
        column(np.float32, 1, lambda r: r.top_p),
        column(np.int32, 0, lambda r: r.top_k),
        column(np.uint32, 0, lambda r: r.seed),
    )


def limits_of(placed: Placed, rows: int, allowed: np.ndarray[Any, Any]) -> Limits:
    """What may be drawn, and what ends each row."""
    stops = np.full((rows, MAX_STOPS), -1, np.int32)
    for row, sequence in placed.items():
        stops[row, : len(sequence.request.stops)] = sequence.request.stops
    return Limits(_host(allowed), _host(stops))


def extras_of(placed: Placed, neutral: Extras) -> Extras:
    """What rows ask besides; ``neutral`` itself where none asks anything."""
    asking = {row: sequence.request for row, sequence in placed.items() if sequence.request.extras}
    if not asking:
        return neutral
    arrays = Extras(*(_host(np.array(array)) for array in neutral))
    filled = cast(Any, arrays)
    for row, request in asking.items():
        filled.min_p[row] = request.min_p
        filled.presence[row], filled.frequency[row] = request.presence_penalty, request.frequency_penalty
        filled.repetition[row] = request.repetition_penalty
        filled.bias_ids[row, : len(request.bias)] = list(request.bias)
        filled.bias[row, : len(request.bias)] = list(request.bias.values())
        if request.grammar is not None:
            filled.mask[row] = request.grammar.mask()
    return arrays


def counts_of(sequence: Sequence, vocab: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the penalties of a request count from: the ids of its prompt, bool [vocab], and those drawn so far, int32 [vocab]."""
    parts = len(sequence.ids) - sequence.drawn
    prompt = np.bincount(sequence.ids[:parts], minlength=vocab) > 0
    return prompt, np.bincount(np.array(sequence.ids[parts:], np.int32), minlength=vocab).astype(np.int32)


def has_penalties(request: Request) -> bool:
    """Whether the device must count what a request draws."""
    return any(name in request.extras for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"))


def _host(values: Any) -> Array:
    """Small arguments as they are: a step takes host arrays, and placing them first would cost a call each."""
    return cast(Array, values)
