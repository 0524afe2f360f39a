"""Sequences in slots and pages driven by hand, as the engine drives them: for tests of the programs over slots."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax.api import Kimi
from kimi_jax.cache import KdaCache, SlotCache
from kimi_jax.engine.request import MAX_STOPS
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.loop import LENGTH, RUNNING, Drawn, Limits, Rows
from kimi_jax.media.prompt import Chunk, call_rows
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.slots import Kind, PrefillCall, SlotSteps

GARBAGE = 1_000_000_007
"""A padding id far outside every vocabulary, and a page far outside every pool."""

_held: dict[Any, SlotSteps] = {}


def slot_steps(kimi: Kimi, **sizes: Any) -> SlotSteps:
    """The compiled programs; equal sizes of the same model share them."""
    key = (id(kimi.runner.steps), *sorted(sizes.items()))
    if key not in _held:
        block = {"block": sizes.pop("block")} if "block" in sizes else {}
        _held[key] = SlotSteps(dataclasses.replace(kimi.runner.steps, **block), **sizes)
    return _held[key]


@dataclasses.dataclass
class Place:
    """Where a sequence stands: its slot's group, number within it, and pages within it."""

    group: int
    slot: int
    pages: list[int]


class Pool:
    """Slots of one cache. Pages are handed out in a shuffled order; what no sequence holds is poison.

    Args:
      kimi: the model.
      seed: of the order of pages.
      filled: what lies where nothing may read.
    """

    def __init__(self, kimi: Kimi, *, calls: int = 2, seed: int = 0, filled: float = np.nan, **sizes: Any) -> None:
        self.kimi = kimi
        self.programs = slot_steps(kimi, **{"slots": 4, "pages": 24, "page": 8, "checkpoints": 4, "top": 5, **sizes})
        p, groups = self.programs, self.programs.groups
        self.calls, self.per_group = calls * groups, p.slots // groups
        self.places = [Place(slot // self.per_group, slot % self.per_group, []) for slot in range(p.slots)]
        order = np.random.default_rng(seed)
        self.free = [order.permutation(p.pages // groups).tolist() for _ in range(groups)]
        self.cache: SlotCache = p.new_cache()
        zeros = np.zeros(p.slots, np.int32)
        self.rows: Any = Rows(zeros.copy(), zeros.copy(), zeros.copy(), np.full(p.slots, LENGTH, np.int32))
        self.sampling = Sampling(*(np.full(p.slots, value, dtype) for value, dtype in NEUTRAL))
        self.extras: Any = jax.tree.map(np.copy, p.neutral_extras(p.slots))
        self.allowed = np.ones(p.steps.config.vocab, bool)
        self.stops = np.full((p.slots, MAX_STOPS), -1, np.int32)
        self.poison(filled)

    # what the host decides

    def give(self, slot: int, tokens: int) -> None:
        """Pages for ``tokens`` tokens in all."""
        place = self.places[slot]
        while len(place.pages) * self.programs.page < tokens:
            place.pages.append(self.free[place.group].pop())

    def start(
        self, *slots: int, pages: Mapping[int, list[int]] | None = None, checkpoint: int = -1, at: int = 0
    ) -> None:
        """Starts new sequences, from nothing or from a checkpoint after ``at`` tokens in shared pages."""
        for slot in slots:
            self.places[slot].pages = list((pages or {}).get(slot, []))
            for field, value in zip(self.rows, (0, at, 0, LENGTH), strict=True):
                field[slot] = value
            self.cache = self.programs.restore(self.cache, *self.pairs(slot, checkpoint)[::-1])

    def save(self, slot: int, checkpoint: int) -> None:
        self.cache = self.programs.save(self.cache, *self.pairs(slot, checkpoint))

    def count(self, slot: int, prompt: np.ndarray, drawn: np.ndarray) -> None:
        """Sets what a slot's penalties count from, each [vocab]."""
        slots, _ = self.pairs(slot, -1)
        of_all = [np.repeat(values[None], len(slots), 0) for values in (prompt, drawn)]
        self.cache = self.programs.count(self.cache, slots, *of_all)

    def ask(self, slot: int, **options: Any) -> None:
        """How a slot draws: fields of Sampling and of Extras, a bias by id, a mask by allowed ids."""
        for name, value in options.items():
            if name == "bias":
                self.extras.bias_ids[slot, : len(value)] = list(value)
                self.extras.bias[slot, : len(value)] = list(value.values())
            elif name == "mask":
                bits = np.zeros(self.extras.mask.shape[1] * 32, bool)
                bits[list(value)] = True
                self.extras.mask[slot] = np.packbits(bits, bitorder="little").view(np.uint32)
            else:
                field = getattr(self.sampling, name, None)
                (getattr(self.extras, name) if field is None else field)[slot] = value

    # what runs on the device

    def feed(
        self,
        parts: Mapping[int, Sequence[int]],
        *,
        last: bool = False,
        budget: int = 1000,
        width: int = 16,
        images: Mapping[int, Chunk | None] | None = None,
    ) -> Drawn:
        """Runs the next tokens of some slots in one call; with ``last`` they draw. What came back, by slot."""
        p, calls = self.programs, self.calls // self.programs.groups
        row_of, used = {}, [0] * p.groups
        for slot in parts:
            group = self.places[slot].group
            row_of[slot] = group * calls + used[group]
            used[group] += 1
        n = self.calls
        call = PrefillCall(
            np.full(n, -1, np.int32),
            np.full((n, width), GARBAGE, np.int32),
            np.full(n, GARBAGE, np.int32),
            np.full(n, width, np.int32),
            np.full((n, p.table), GARBAGE, np.int32),
            np.ones(n, bool),
            np.full(n, budget, np.int32),
        )
        picked = np.zeros(n, int)
        for slot, part in parts.items():
            row, start = row_of[slot], int(self.rows.position[slot])
            self.give(slot, start + len(part))
            call.slots[row], call.start[row], call.new[row], call.last[row] = (
                self.places[slot].slot,
                start,
                len(part),
                last,
            )
            call.ids[row, : len(part)] = part
            call.tables[row] = self.table(slot)
            picked[row] = slot
        of = lambda fields: type(fields)(*(np.asarray(field)[picked] for field in fields))  # noqa: E731
        limits = Limits(self.allowed, self.stops[picked])
        given = (of(self.sampling), of(self.extras), limits)
        if images is None:
            self.cache, rows, drawn = p.prefill(self.kimi.runner.params, self.cache, call, *given)
        else:
            chunks = {row_of[slot]: chunk for slot, chunk in images.items()}
            found = call_rows([chunks.get(row) for row in range(n)], width)
            assert found is not None
            self.cache, rows, drawn = p.prefill_images(
                self.kimi.runner.params, self.cache, call, ImageRows(*found), *given
            )
        rows, drawn = jax.device_get((rows, drawn))
        for slot, row in row_of.items():
            for field, new in zip(self.rows, rows, strict=True):
                field[slot] = new[row]
        return jax.tree.map(lambda array: array[[row_of[slot] for slot in parts]], drawn)

    def decode(self, kind: Kind = "greedy", steps: int | None = None, *, room: int | None = None) -> Drawn:
        """One block; running slots get pages for all of it, or for ``room`` tokens in all."""
        p = self.programs
        steps = p.steps.block if steps is None else steps
        for slot in np.flatnonzero(self.rows.status == RUNNING):
            self.give(slot, min(self.rows.position[slot] + steps if room is None else room, p.steps.capacity))
        tables = np.stack([self.table(slot) for slot in range(p.slots)])
        limits = Limits(self.allowed, self.stops)
        arguments = (tables, self.rows, self.sampling, self.extras, limits, np.int32(steps))
        self.cache, rows, drawn = p.decode(kind)(self.kimi.runner.params, self.cache, *arguments)
        self.rows, drawn = Rows(*map(np.array, rows)), jax.device_get(drawn)
        return drawn

    def run(
        self, prompt: Sequence[int], tokens: int, *, slot: int = 0, kind: Kind = "full", **options: Any
    ) -> list[int]:
        """A request alone, from its prompt to its last drawn id."""
        self.ask(slot, **options)
        self.start(slot)
        for at in range(0, len(prompt), 16):
            found = self.feed({slot: prompt[at : at + 16]}, last=at + 16 >= len(prompt), budget=tokens)
        ids = [int(found.ids[0, 0])]
        while self.rows.status[slot] == RUNNING:
            ids += [int(i) for i in self.decode(kind).ids[slot] if i >= 0]
        return ids

    # what tests look at and spoil

    def poison(self, value: float) -> None:
        """Overwrites all that no later call may read: pages and rows beyond every sequence, states and counts of unused slots."""
        used, p = {}, self.programs
        for slot, place in enumerate(self.places):
            for index, page in enumerate(place.pages):
                rows = np.clip(self.rows.position[slot] - index * p.page, 0, p.page)
                used[place.group, page] = max(rows, used.get((place.group, page), 0))
        idle = [slot for slot, place in enumerate(self.places) if not place.pages]

        def overwrite(entry: Any) -> Any:
            arrays = [np.array(array) for array in jax.tree.leaves(entry)]
            if isinstance(entry, KdaCache):
                for array in arrays:
                    array[idle] = value
                return KdaCache(*map(_like, arrays, entry))
            for pool in arrays:
                for page in range(len(pool)):
                    group = page // (p.pages // p.groups)
                    pool[page, used.get((group, page % (p.pages // p.groups)), 0) :] = value
            held = [_like(pool, old) for pool, old in zip(arrays, jax.tree.leaves(entry), strict=True)]
            return jax.tree.unflatten(jax.tree.structure(entry), held)

        drawn = np.array(self.cache.seen.drawn)
        drawn[idle] = GARBAGE
        seen = self.cache.seen._replace(drawn=_like(drawn, self.cache.seen.drawn))
        self.cache = self.cache._replace(layers=tuple(map(overwrite, self.cache.layers)), seen=seen)

    def page_of(self, slot: int, position: int) -> int:
        """The page in the whole pool that holds a token of a slot."""
        p, place = self.programs, self.places[slot]
        return place.group * (p.pages // p.groups) + place.pages[position // p.page]

    def state(self, slot: int) -> list[np.ndarray]:
        """The recurrent states of a slot."""
        return [
            np.asarray(array)[slot] for entry in self.cache.layers if isinstance(entry, KdaCache) for array in entry
        ]

    def table(self, slot: int) -> np.ndarray:
        """Of an idle slot: pages that exist and pages that do not, none of which may be touched."""
        size = self.programs.table
        if self.rows.status[slot] != RUNNING and not self.places[slot].pages:
            return np.where(np.arange(size) % 2, GARBAGE, 1).astype(np.int32)
        pages = self.places[slot].pages
        return np.array(pages + [-1] * (size - len(pages)), np.int32)

    def pairs(self, slot: int, checkpoint: int) -> tuple[np.ndarray, np.ndarray]:
        """Arguments of save: one pair for each group, idle for the others."""
        slots, checkpoints = np.full((2, self.programs.groups), -1, np.int32)
        slots[self.places[slot].group], checkpoints[self.places[slot].group] = self.places[slot].slot, checkpoint
        return slots, checkpoints


NEUTRAL = ((0, np.float32), (1, np.float32), (0, np.int32), (0, np.uint32))


def scores(found: Drawn, row: int, step: int = 0) -> np.ndarray:
    """Log-probabilities of all ids, of a pool whose ``top`` is the vocabulary."""
    assert found.top
    ids, values = found.top.ids[row, step], found.top.logprobs[row, step]
    assert sorted(ids) == list(range(len(ids)))
    return values[np.argsort(ids)]


def _like(values: np.ndarray, array: jax.Array) -> jax.Array:
    return jax.device_put(values.astype(array.dtype), array.sharding)
