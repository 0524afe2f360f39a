"""A device in NumPy that remembers exactly what it was told: pages hold token ids, a recurrent state is a hash of them.

The next id is a hash of the whole history, read back through page tables and through the state, and of all that a request asks.
A wrong table, a stale page, a leaked state or a wrong checkpoint changes the ids at once. It has the methods of
``kimi_jax.slots.SlotSteps``, and its own rules are those of the docstrings there.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np

from kimi_jax.engine.request import ImageSpan, Request
from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Drawn, Limits, Rows
from kimi_jax.ops.sample.api import GREEDY_BELOW, Alternatives, Sampling
from kimi_jax.ops.sample.extras import BIAS, Extras
from kimi_jax.slots import WAITING

VOCAB = 97
NAN = 3
"""An id that makes all scores after it not finite."""

PLACE = 7
"""An id that stands for rows of images; by itself it is an id like others."""

POISON = 1 << 40
PRIME = (1 << 61) - 1
START = 1


def image(start: int, tokens: int, name: int) -> ImageSpan:
    """An image whose row ``i`` is remembered as the token ``VOCAB + 8 * name + i``."""
    return ImageSpan(start, (np.arange(tokens) + 8.0 * name)[:, None].astype(np.float32), bytes([name]))


def seen(ids: list[int], images: Any) -> list[int]:
    """What the device remembers of a prompt: rows in the place of ids."""
    found = list(ids)
    for span in images:
        found[span.start : span.end] = [VOCAB + int(value) for value in span.rows[:, 0]]
    return found


def after(state: int, token: int) -> int:
    """The recurrent state after one more token."""
    return 0 if state == 0 or token == NAN else (state * 1_000_003 + token + 7) % PRIME or 1


def fold(tokens: Any) -> int:
    """The recurrent state after some tokens from the start of a sequence; 0 where they are not finite."""
    state = START
    for token in tokens:
        state = after(state, int(token))
    return state


def choose(read: list[int], state: int, asked: tuple, words: np.ndarray, allowed: np.ndarray) -> int:
    """The id drawn after a history; -1 where the scores are not finite. ``state`` is 0 then."""
    if state == 0:
        return -1
    open_ids = np.flatnonzero(allowed & unpacked(words))
    mixed = hash((fold(read), state, len(read), asked))
    return int(open_ids[mixed % len(open_ids)])


def unpacked(words: np.ndarray) -> np.ndarray:
    """[vocab] bool of a mask of bits."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def packed(allowed: np.ndarray) -> np.ndarray:
    """The mask of [vocab] bool."""
    bits = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little")
    return bits.view(np.uint32)


def what_is_asked(kind: str, sampling: Sampling, extras: Extras, row: int, prompt: Any, drawn: Any) -> tuple:
    """What decides a draw beside the history, as far as a kind of program knows it."""
    asked: tuple = ()
    if kind != "greedy" and sampling.temperature[row] >= GREEDY_BELOW:
        names = ("temperature", "top_p", "top_k", "seed")
        asked += tuple(float(getattr(sampling, name)[row]) for name in names)
    if kind == "full":
        ids = extras.bias_ids[row]
        bias = tuple(sorted(zip(ids[ids >= 0].tolist(), extras.bias[row][ids >= 0].tolist(), strict=True)))
        penalties = tuple(float(getattr(extras, name)[row]) for name in ("presence", "frequency", "repetition"))
        counts = () if penalties == (0.0, 0.0, 1.0) else (crc32(prompt.tobytes()), crc32(drawn.tobytes()))
        neutral = bias == () and counts == () and extras.min_p[row] == 0
        asked += () if neutral else (float(extras.min_p[row]), bias, penalties, counts)
    return asked


def asked_by(request: Request, ids: list[int], prompt: int) -> tuple:
    """The same of a request whose first ``prompt`` ids were given and the others drawn."""
    one = lambda value, dtype: np.array([value], dtype)  # noqa: E731
    sampling = Sampling(
        one(request.temperature, np.float32),
        one(request.top_p, np.float32),
        one(request.top_k, np.int32),
        one(request.seed, np.uint32),
    )
    bias_ids = np.full((1, BIAS), -1)
    bias_ids[0, : len(request.bias)] = list(request.bias)
    bias = np.zeros((1, BIAS), np.float32)
    bias[0, : len(request.bias)] = list(request.bias.values())
    extras = Extras(
        one(request.min_p, np.float32),
        one(request.presence_penalty, np.float32),
        one(request.frequency_penalty, np.float32),
        one(request.repetition_penalty, np.float32),
        bias_ids,
        bias,
        None,
    )
    counts = np.bincount(ids[prompt:], minlength=VOCAB).astype(np.int32)
    return what_is_asked("full", sampling, extras, 0, np.bincount(ids[:prompt], minlength=VOCAB) > 0, counts)


def kept(anchor: int, token: int, length: int) -> int:
    """How many of ``length`` drafts are right in the step from a place in the sequence; the others leave rows behind."""
    return min(length, (anchor * 7 + token) % (length + 2))


def alone(request: Request, capacity: int, allowed: np.ndarray, drafts: int = 0) -> tuple[list[int], str]:
    """What a request draws and why it ends, without slots, pages or anybody else.

    With drafts, what is drawn at a temperature depends on where its step began, as the random numbers of real ones do.
    """
    ids, prompt = list(request.ids), len(request.ids)
    warm = bool(drafts) and not request.extras and request.temperature >= GREEDY_BELOW
    anchor, left = None, 1  # the first id is drawn without drafts
    while True:
        if warm and not left:
            anchor = len(ids) - 1
            length = min(drafts, request.max_tokens - (len(ids) - prompt) - 1, capacity - 1 - anchor)
            left = kept(anchor, ids[-1], length) + 1
        left -= 1
        words = packed(np.ones(VOCAB, bool)) if request.grammar is None else request.grammar.mask()
        told = seen(ids, request.images)
        asked = asked_by(request, ids, prompt) + (() if anchor is None else (anchor,))
        token = choose(told, fold(told), asked, words, allowed)
        if token < 0:
            return ids[prompt:], "error"
        ids.append(token)
        if token in request.stops:
            return ids[prompt:], "stop"
        if request.grammar is not None:
            request.grammar.accept(token)
            if request.grammar.finished:
                return ids[prompt:], "stop"
        if len(ids) - prompt == request.max_tokens or len(ids) - 1 >= capacity:
            return ids[prompt:], "length"


@dataclass
class Memory:
    """What the device holds: per group, and per slot of a group."""

    pages: np.ndarray
    states: np.ndarray
    kept: np.ndarray
    prompt: np.ndarray
    drawn: np.ndarray


@dataclass
class FakeDevice:
    """Slot programs over :class:`Memory`; ``shapes`` gathers what a real device would have compiled."""

    capacity: int
    block: int
    slots: int
    pages: int
    page: int
    checkpoints: int
    groups: int = 1
    top: int = 20
    drafts: int = 0
    shapes: set = field(default_factory=set)

    @property
    def steps(self) -> Any:
        config, precision = SimpleNamespace(vocab=VOCAB, hidden=1), SimpleNamespace(activation=np.dtype(np.float32))
        return SimpleNamespace(capacity=self.capacity, block=self.block, config=config, precision=precision)

    @property
    def stride(self) -> int:
        return self.drafts + 1

    @property
    def table(self) -> int:
        return self.capacity // self.page

    def new_cache(self) -> Memory:
        """Everything poisoned: nothing may be read before it is written."""
        local = self.slots // self.groups
        return Memory(
            np.full((self.groups, self.pages // self.groups, self.page), POISON),
            np.full((self.groups, local), POISON),
            np.full((self.groups, self.checkpoints // self.groups), POISON),
            np.ones((self.groups, local, VOCAB), bool),
            np.full((self.groups, local, VOCAB), 99, np.int32),
        )

    def neutral_extras(self, rows: int) -> Extras:
        zeros = np.zeros(rows, np.float32)
        words = np.tile(packed(np.ones(VOCAB, bool)), (rows, 1))
        ids = np.full((rows, BIAS), -1, np.int32)
        return Extras(zeros, zeros, zeros, zeros + 1, ids, np.zeros((rows, BIAS), np.float32), words)

    def _used(self, name: str, *arrays: Any) -> None:
        self.shapes.add((name, *[(np.shape(array), np.asarray(array).dtype) for array in arrays]))

    def prefill(self, params, cache, call, sampling, extras, limits: Limits):
        self._used("prefill", *call, *sampling, *extras, *limits)
        return self._prefill(cache, call, call.ids, sampling, extras, limits)

    def prefill_images(self, params, cache, call, images, sampling, extras, limits: Limits):
        self._used("prefill_images", *call, *images, *sampling, *extras, *limits)
        told = np.where(images.here, VOCAB + images.rows[..., 0].astype(int), call.ids)
        return self._prefill(cache, call, told, sampling, extras, limits)

    def _prefill(self, cache, call, told, sampling, extras, limits: Limits):
        rows = len(call.slots)
        local = [int(slot) for slot in call.slots]
        for group in range(self.groups):
            given = [
                slot for slot in local[group * rows // self.groups : (group + 1) * rows // self.groups] if slot >= 0
            ]
            assert len(given) == len(set(given)), "a slot twice in a call"
        ids, logprobs = np.full((rows, 1), -1, np.int32), np.zeros((rows, 1), np.float32)
        top = np.zeros((rows, 1, self.top), np.int32)
        token, position, status = np.zeros(rows, np.int32), np.array(call.start), np.full(rows, RUNNING, np.int32)
        for row, slot in enumerate(local):
            if slot < 0:
                continue
            group = row // (rows // self.groups)
            assert 1 <= call.new[row] <= call.ids.shape[1] and call.start[row] + call.new[row] <= self.capacity
            for offset in range(call.new[row]):
                self._write(cache, group, slot, call.tables[row], position[row], told[row, offset])
                position[row] += 1
            status[row] = BROKEN if cache.states[group, slot] == 0 else WAITING
            if call.last[row]:
                found = self._draw(
                    cache, "full", group, slot, call.tables[row], position[row], sampling, extras, limits, row
                )
                status[row] = self._verdict(found, limits, row, call.budget[row] - 1, position[row])
                token[row] = ids[row, 0] = found
                logprobs[row, 0], top[row, 0] = -found, _likeliest(found, self.top)
        told = Rows(token, position, call.budget - 1, status)
        return cache, told, Drawn(ids, logprobs, Alternatives(top, -top.astype(np.float32)))

    def decode(self, kind: str):
        def run(params, cache, tables, rows, sampling, extras, limits, steps, *allowances):
            self._used(kind, tables, *rows, *sampling, *extras, *limits, steps, *allowances)
            (most,) = allowances or (np.full(self.slots, -1),)
            token, position, budget, status = (np.array(array) for array in rows)
            width = self.block * self.stride
            ids, logprobs = np.full((self.slots, width), -1, np.int32), np.zeros((self.slots, width), np.float32)
            top = np.zeros((self.slots, width, self.top), np.int32)
            stayed, verified = np.zeros((self.slots, self.stride), np.int32), np.zeros(self.slots, np.int32)
            for step in range(min(int(steps), self.block)):
                for row in np.flatnonzero(status == RUNNING):
                    group, slot = divmod(int(row), self.slots // self.groups)
                    length = min(max(int(most[row]), 0), budget[row] - 1, self.capacity - 1 - position[row])
                    table = tables[row]
                    if table[(position[row] + length) // self.page] < 0:
                        continue  # pauses
                    first = position[row]
                    anchor = int(first) if most[row] >= 0 and sampling.temperature[row] >= GREEDY_BELOW else None
                    right = kept(int(first), int(token[row]), int(length))
                    for place in range(first, first + length + 1):
                        cache.pages[group, table[place // self.page], place % self.page] = POISON
                    for place in range(right + 1):
                        self._write(cache, group, slot, table, position[row], token[row])
                        position[row], budget[row] = position[row] + 1, budget[row] - 1
                        found = self._draw(
                            cache, kind, group, slot, table, position[row], sampling, extras, limits, row, anchor
                        )
                        status[row] = self._verdict(found, limits, row, budget[row], position[row])
                        at = step * self.stride + place
                        ids[row, at] = token[row] = found
                        logprobs[row, at], top[row, at] = -found, _likeliest(found, self.top)
                        if status[row] != RUNNING:
                            break
                    if most[row] >= 0:
                        verified[row] += length
                        stayed[row, min(place, right)] += 1
            told = Rows(token, position, budget, status)
            alternatives = Alternatives(top, -top.astype(np.float32)) if kind == "full" else ()
            tally = SimpleNamespace(stayed=stayed, verified=verified) if self.drafts else ()
            return cache, told, Drawn(ids, logprobs, alternatives, tally)

        return run

    def save(self, cache, slots, checkpoints):
        self._used("save", slots, checkpoints)
        for group, slot, checkpoint in self._pairs(slots, checkpoints):
            if slot >= 0 and checkpoint >= 0:
                cache.kept[group, checkpoint] = cache.states[group, slot]
        return cache

    def restore(self, cache, checkpoints, slots):
        self._used("restore", checkpoints, slots)
        for group, slot, checkpoint in self._pairs(slots, checkpoints):
            if slot >= 0:
                cache.states[group, slot] = START if checkpoint < 0 else cache.kept[group, checkpoint]
        return cache

    def count(self, cache, slots, prompt, drawn):
        self._used("count", slots, prompt, drawn)
        for row, slot in enumerate(slots):
            if slot >= 0:
                group = row // (len(slots) // self.groups)
                cache.prompt[group, slot], cache.drawn[group, slot] = prompt[row], drawn[row]
        return cache

    def _pairs(self, slots, checkpoints):
        assert len(slots) % self.groups == 0
        for row, (slot, checkpoint) in enumerate(zip(slots, checkpoints, strict=True)):
            yield row // (len(slots) // self.groups), int(slot), int(checkpoint)

    def _write(self, cache, group, slot, table, position, token) -> None:
        page = table[position // self.page]
        assert page >= 0, "a token without a page"
        cache.pages[group, page, position % self.page] = token
        cache.states[group, slot] = after(int(cache.states[group, slot]), int(token))

    def _draw(
        self, cache, kind, group, slot, table, position, sampling, extras, limits, row, anchor: int | None = None
    ) -> int:
        held = table[: -(-int(position) // self.page)]
        read = cache.pages[group, held].ravel()[:position].tolist()
        asked = what_is_asked(kind, sampling, extras, row, cache.prompt[group, slot], cache.drawn[group, slot])
        asked += () if anchor is None else (anchor,)
        words = extras.mask[row] if kind == "full" else packed(np.ones(VOCAB, bool))
        found = choose(read, int(cache.states[group, slot]), asked, words, limits.allowed)
        if kind == "full" and found >= 0:
            cache.drawn[group, slot, found] += 1
        return found

    def _verdict(self, found, limits, row, budget, position) -> int:
        if found < 0:
            return BROKEN
        if found in limits.stops[row]:
            return STOPPED
        return LENGTH if budget <= 0 or position >= self.capacity else RUNNING


def _likeliest(found: int, top: int) -> np.ndarray:
    return (found + np.arange(top)) % VOCAB
