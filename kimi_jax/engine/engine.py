"""Many requests at once on one set of slots: admission, chunked prefill between decode blocks, prefix hits, preemption."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from kimi_jax.draft.slot_steps import slot_steps
from kimi_jax.engine import batch
from kimi_jax.engine.buckets import widths
from kimi_jax.engine.limits import EngineLimits, LimitsError, check_limits
from kimi_jax.engine.request import DraftCounts, Event, Request, check
from kimi_jax.engine.runner import FINISH
from kimi_jax.engine.scheduler import Scheduler, rows_of
from kimi_jax.engine.sequence import Sequence
from kimi_jax.engine.stats import EngineFull, EngineStats
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.loop import BROKEN, Drawn, Rows, Steps
from kimi_jax.model import Params
from kimi_jax.ops.sample.extras import Extras
from kimi_jax.slots import Kind, SlotSteps

__all__ = ["Engine", "EngineFull", "EngineLimits", "EngineStats", "LimitsError"]

KINDS: tuple[Kind, ...] = ("greedy", "random", "full")

WAITING_SHARE = 4
"""Part of a decode block that runs while prompts wait: their chunks and the others' tokens then share the device about evenly."""

REMEMBERED = 4096
"""Ended requests whose cached tokens are still known."""


_EMPTY: Any = np.empty(0)


class Engine:
    """Runs requests to their ends, many at once. For one thread; knows token ids only.

    Where the model has a draft, requests without extras take several ids a step; the others are decoded as without one.

    Args:
      programs: compiled slot programs.
      params: placed parameters.
      allowed: [vocab] bool, ids that may be drawn.
      limits: sizes, the same as those of ``programs``.
      images: whether requests may have images, which takes one more program.
      clock: seconds, for :attr:`EngineFull.retry_after` only.

    Raises:
      LimitsError: sizes that do not fit one another or the layout, all of them.
    """

    def __init__(
        self,
        programs: SlotSteps,
        params: Params,
        allowed: np.ndarray[Any, Any],
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        images: bool = False,
    ) -> None:
        check_limits(limits, programs.steps.capacity, programs.groups)
        self._programs, self._params, self._allowed, self._clock = programs, params, allowed, clock
        self.limits = limits
        self._vocab, self._block = programs.steps.config.vocab, programs.steps.block
        self._scheduler = Scheduler(limits, programs.steps.capacity, programs.groups)
        self._cache = programs.new_cache()
        self._embed = programs.steps.config.hidden if images else None
        self._neutral: dict[int, Extras] = {}
        self._open: dict[int, Sequence] = {}
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._ends: deque[float] = deque(maxlen=32)
        self._submitted = self._turns = self._drawn = 0
        self._drafts = None if programs.stride == 1 else DraftCounts(0, (0,) * programs.stride)

    @classmethod
    def build(
        cls, steps: Steps, params: Params, allowed: np.ndarray[Any, Any], limits: EngineLimits, *, images: bool = False
    ) -> "Engine":
        """An engine on the programs of a loaded model (``Kimi.runner`` has steps, params and allowed).

        Raises:
          LimitsError, SlotsError: sizes that do not fit one another, the layout or the kernels, all of them.
        """
        check_limits(limits, steps.capacity, steps.parallel.size("batch"))
        programs = slot_steps(steps, limits.slots, limits.pages, limits.page, limits.checkpoints)
        return cls(programs, params, allowed, limits, images=images)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can hold, prompt and answer."""
        return self._programs.steps.capacity

    @property
    def drafts(self) -> int:
        """Tokens drafted for each decode step of a request; 0 without a draft."""
        return self._programs.stride - 1

    # ---- from outside

    def submit(self, request: Request) -> int:
        """Puts a request into the queue and returns its number, which its events carry.

        Raises:
          RequestError: it can never run; lists every problem.
          EngineFull: the queue is full.
        """
        check(request, self._vocab, self.capacity, self._embed)
        if len(self._scheduler.queue) >= self.limits.queue:
            raise EngineFull(len(self._scheduler.queue), self._retry_after())
        number, self._submitted = self._submitted, self._submitted + 1
        sequence = Sequence.of(number, request, self.limits.page, self._programs.stride)
        self._open[number] = sequence
        self._scheduler.enqueue(sequence)
        return number

    def cancel(self, number: int) -> None:
        """Ends a request: its slot and pages are free at once and no event of it follows. Unknown numbers are ignored."""
        sequence = self._open.get(number)
        if sequence is not None:
            self._close(sequence)

    def turn(self) -> list[Event]:
        """Admits, runs at most one prefill call and one decode block, and returns what they drew, in order per request.

        [] when there is nothing to do. A row whose scores are not finite ends with ``error``; the others go on.
        """
        if self.idle:
            return []
        self._turns += 1
        steps = self._steps()
        self._scheduler.grow(steps)
        self._admit()
        decoding = [sequence for sequence in self._scheduler.running if sequence.decoding]
        # both are on their way before the host waits for either
        first, more = self._prefill(), self._decode(decoding, steps)
        return [*self._first_ids(first), *self._next_ids(more)]

    @property
    def idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._open

    def cached_tokens(self, number: int) -> int:
        """Prompt tokens of a request that came from the prefix cache; 0 until it is admitted.

        Still known for the last few thousand requests that ended.
        """
        sequence = self._open.get(number)
        return self._cached.get(number, 0) if sequence is None else sequence.hit or 0

    def stats(self) -> EngineStats:
        """Counts at this moment."""
        scheduler, limits = self._scheduler, self.limits
        groups = scheduler.groups
        kept = sum(group.pages.idle for group in groups)
        return EngineStats(
            queued=len(scheduler.queue),
            running=len(scheduler.running),
            slots=limits.slots,
            pages=limits.pages,
            pages_used=sum(group.pages.size - group.pages.free for group in groups) - kept,
            pages_kept=kept,
            checkpoints=limits.checkpoints,
            checkpoints_used=sum(group.checkpoints.size - group.checkpoints.free for group in groups),
            prompt_tokens=scheduler.prompt_tokens,
            hit_tokens=scheduler.hit_tokens,
            drawn_tokens=self._drawn,
            preemptions=scheduler.preemptions,
            turns=self._turns,
            drafts=self._drafts,
        )

    def forget(self) -> None:
        """Empties the prefix cache."""
        for group in self._scheduler.groups:
            group.tree.clear()

    def warm(self) -> None:
        """Compiles every program by running it with nothing to do; no later request compiles anything."""
        groups, local = self._programs.groups, self.limits.slots // self._programs.groups
        for width in widths(self.limits.chunk):
            for rows in sorted({1, rows_of(width, self.limits.chunk, local)}):
                self._run_prefill({}, rows * groups, width)
        if self._embed is not None:
            self._run_prefill({}, groups, self.limits.chunk, self._no_images())
        for kind in KINDS:
            self._run_decode({}, kind, self._block)
        nothing = np.full(groups, -1, np.int32)
        self._cache = self._programs.restore(self._cache, nothing, nothing)
        self._cache = self._programs.save(self._cache, nothing, nothing)
        counts = np.zeros((groups, self._vocab), np.int32)
        self._cache = self._programs.count(self._cache, nothing, counts > 0, counts)
        jax.block_until_ready(self._cache)

    # ---- one turn

    def _steps(self) -> int:
        """Decode steps of this turn."""
        running = self._scheduler.running
        if any(sequence.decoding and sequence.request.grammar is not None for sequence in running):
            return 1  # each mask depends on the id before it
        coming = self._scheduler.queue and len(running) < self.limits.slots
        if coming or any(sequence.prefilling for sequence in running):
            return max(1, self._block // WAITING_SHARE)
        return self._block

    def _admit(self) -> None:
        admitted = self._scheduler.admit()
        self._copy_states([(-1 if start is None else start, sequence) for sequence, start in admitted], save=False)
        self._count([sequence for sequence, _ in admitted if batch.has_penalties(sequence.request)])

    def _prefill(self) -> "_Block":
        """Dispatches one call; its requests are those that draw their first id or have come to a checkpoint."""
        scheduler, chunk = self._scheduler, self.limits.chunk
        chosen, rows, width = scheduler.next_prefill(self._turns)
        if not chosen:
            return _Block()
        placed = self._by_row(chosen, rows)
        results = self._run_prefill(placed, rows * self._programs.groups, width)
        for sequence in chosen:
            scheduler.reach(sequence, sequence.piece(chunk))
        self._copy_states([(place, s) for s in chosen for place in s.saved.values()], save=True)
        return _Block({row: s for row, s in placed.items() if s.saved or s.position == s.end}, results)

    def _decode(self, decoding: list[Sequence], steps: int) -> "_Block":
        """Dispatches one block."""
        if not decoding:
            return _Block()
        local = self.limits.slots // self._programs.groups
        placed = {sequence.group * local + sequence.place: sequence for sequence in decoding}
        kind = batch.kind_of(sequence.request for sequence in decoding)
        return _Block(placed, self._run_decode(placed, kind, steps))

    def _by_row(self, chosen: list[Sequence], rows: int) -> dict[int, Sequence]:
        """Rows of a prefill call: those of the first group, then those of the next."""
        free = [iter(range(group * rows, (group + 1) * rows)) for group in range(self._programs.groups)]
        return {next(free[sequence.group]): sequence for sequence in chosen}

    # ---- what a block has drawn

    def _first_ids(self, block: "_Block") -> Iterator[Event]:
        rows, drawn = block.read()
        for row, sequence in block.placed.items():
            if rows.status[row] != BROKEN:
                self._scheduler.publish(sequence)
            sequence.decoding = sequence.position == sequence.end
            yield from self._news(sequence, row, rows, drawn)

    def _next_ids(self, block: "_Block") -> Iterator[Event]:
        rows, drawn = block.read()
        for slot, sequence in block.placed.items():
            sequence.position = int(rows.position[slot])
            self._count_drafts(sequence, drawn.drafts, slot)
            yield from self._news(sequence, slot, rows, drawn)

    def _news(self, sequence: Sequence, row: int, rows: Rows, drawn: Drawn) -> Iterator[Event]:
        """Books the ids of one request and reports them, the last with its end."""
        request, finish = sequence.request, FINISH.get(int(rows.status[row]))
        steps = np.flatnonzero(np.asarray(drawn.ids[row]) >= 0).tolist()
        for step in steps:
            token = int(drawn.ids[row, step])
            sequence.ids.append(token)
            sequence.drawn += 1
            self._drawn += 1
            if request.grammar is not None and finish in (None, "length"):
                request.grammar.accept(token)
                finish = "stop" if request.grammar.finished else finish  # complete, even with its last id
            last = step == steps[-1] and finish != "error"
            top = _top(request, drawn, row, step)
            score, end = float(drawn.logprobs[row, step]), finish if last else None
            yield Event(sequence.number, token, score, end, top, sequence.drafts)
        if finish == "error":
            yield Event(sequence.number, None, 0.0, finish, drafts=sequence.drafts)
        if finish is not None:
            self._ends.append(self._clock())
            self._close(sequence)

    def _count_drafts(self, sequence: Sequence, tally: Any, slot: int) -> None:
        """Adds what a call has told of one request's drafts."""
        if sequence.drafts is None or self._drafts is None:
            return
        news = DraftCounts(int(tally.verified[slot]), tuple(tally.stayed[slot].tolist()))
        sequence.drafts, self._drafts = sequence.drafts + news, self._drafts + news

    def _close(self, sequence: Sequence) -> None:
        """Forgets a request and frees what it holds."""
        del self._open[sequence.number]
        if sequence.slot is None:
            self._scheduler.queue.remove(sequence)
        else:
            self._scheduler.release(sequence)
        self._cached[sequence.number] = sequence.hit or 0
        while len(self._cached) > REMEMBERED:
            self._cached.popitem(last=False)

    def _retry_after(self) -> float:
        """A place in the queue is free when the next request ends."""
        if len(self._ends) < 2:
            return 1.0
        return min(max((self._clock() - self._ends[0]) / len(self._ends), 1.0), 60.0)

    # ---- calls of the programs

    def _run_prefill(
        self, placed: dict[int, Sequence], rows: int, width: int, images: ImageRows | None = None
    ) -> tuple[Rows, Drawn]:
        programs = self._programs
        call = batch.prefill_call(placed, rows, width, programs.table, self.limits.chunk)
        dtype = programs.steps.precision.activation
        seen = batch.image_rows(placed, rows, width, self.limits.chunk, dtype) or images
        run, given = (programs.prefill, (call,)) if seen is None else (programs.prefill_images, (call, seen))
        self._cache, told, drawn = run(
            self._params,
            self._cache,
            *given,
            batch.sampling_of(placed, rows),
            batch.extras_of(placed, self._neutral_extras(rows)),
            batch.limits_of(placed, rows, self._allowed),
        )
        return told, drawn

    def _no_images(self) -> ImageRows:
        """What a call without images gives the program for images, with its dtypes."""
        groups, chunk, dtype = self._programs.groups, self.limits.chunk, self._programs.steps.precision.activation
        rows: Any = np.zeros((groups, chunk, self._embed or 0), dtype)
        here: Any = np.zeros((groups, chunk), bool)
        return ImageRows(rows, here)

    def _run_decode(self, placed: dict[int, Sequence], kind: Kind, steps: int) -> tuple[Rows, Drawn]:
        programs, slots = self._programs, self.limits.slots
        tables, rows = batch.decode_rows(placed, slots, programs.table)
        self._cache, told, drawn = programs.decode(kind)(
            self._params,
            self._cache,
            tables,
            rows,
            batch.sampling_of(placed, slots),
            batch.extras_of(placed, self._neutral_extras(slots)),
            batch.limits_of(placed, slots, self._allowed),
            np.int32(steps),
            *([] if programs.stride == 1 else [batch.drafts_of(placed, slots)]),
        )
        return told, drawn

    def _copy_states(self, copies: list[tuple[int, Sequence]], *, save: bool) -> None:
        """Between checkpoints and slots, as many calls as the fullest group needs: one state of each group in a call."""
        waiting: list[list[tuple[int, int]]] = [[] for _ in range(self._programs.groups)]
        for checkpoint, sequence in copies:
            waiting[sequence.group].append((checkpoint, sequence.place))
        for wave in zip_longest(*waiting, fillvalue=(-1, -1)):
            checkpoints, slots = (np.array(column, np.int32) for column in zip(*wave, strict=True))
            if save:
                self._cache = self._programs.save(self._cache, slots, checkpoints)
            else:
                self._cache = self._programs.restore(self._cache, checkpoints, slots)

    def _count(self, sequences: list[Sequence]) -> None:
        """Tells the device what the penalties of some requests count from: one request of each group in a call."""
        waiting: list[list[Sequence]] = [[s for s in sequences if s.group == g] for g in range(self._programs.groups)]
        for wave in zip_longest(*waiting):
            slots = np.full(len(wave), -1, np.int32)
            prompt, drawn = np.zeros((len(wave), self._vocab), bool), np.zeros((len(wave), self._vocab), np.int32)
            for group, sequence in enumerate(wave):
                if sequence is not None:
                    slots[group] = sequence.place
                    prompt[group], drawn[group] = batch.counts_of(sequence, self._vocab)
            self._cache = self._programs.count(self._cache, slots, prompt, drawn)

    def _neutral_extras(self, rows: int) -> Extras:
        if rows not in self._neutral:
            self._neutral[rows] = self._programs.neutral_extras(rows)
        return self._neutral[rows]


@dataclass(frozen=True)
class _Block:
    """A call on its way: its requests by their row, and its results on the device."""

    placed: Mapping[int, Sequence] = field(default_factory=dict)
    results: tuple[Rows, Drawn] | None = None

    def read(self) -> tuple[Rows, Drawn]:
        """Waits for the results and copies them to the host, once; nothing where they concern nobody."""
        if self.results is None or not self.placed:
            return _NOTHING
        return jax.device_get(self.results)


_NOTHING = (Rows(*4 * [_EMPTY]), Drawn(_EMPTY, _EMPTY))


def _top(request: Request, drawn: Drawn, row: int, step: int) -> tuple[tuple[int, float], ...]:
    """The alternatives that a request asked for, likeliest first; fewer where fewer may be drawn."""
    if not request.logprobs:
        return ()
    ids, logprobs = (array[row, step, : request.logprobs].tolist() for array in drawn.top)
    return tuple((number, logprob) for number, logprob in zip(ids, logprobs, strict=True) if number >= 0)
