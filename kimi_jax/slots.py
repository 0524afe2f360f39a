"""Compiled programs over a fixed set of slots and a pool of pages: what a continuously batching engine calls.

A slot holds the recurrent states of one sequence; its latent rows lie in pages that a table names, and that sequences may share.
The host decides all of that and passes tables; no program depends on a length, a slot, a page or an option.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from kimi_jax import cache as cache_lib
from kimi_jax.cache import Cache, KdaCache, SlotCache
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.loop import BROKEN, RUNNING, Drawn, Limits, Rows, Steps, book, is_spec, run_block
from kimi_jax.model import KimiModel, Params, bind
from kimi_jax.ops.mla.launch import TILE, check_cache
from kimi_jax.ops.sample import extras as shaping
from kimi_jax.ops.sample.api import Alternatives, Choice, Sampling, sample, sample_full
from kimi_jax.ops.sample.extras import Extras, Seen
from kimi_jax.placement.compiler import compiler_options, platform_of_mesh
from kimi_jax.problems import ProblemsError

Kind = Literal["greedy", "random", "full"]
"""How a decode program draws: greedy only; with temperature, top-k and top-p; with every extra."""

WAITING, PAUSED = 4, 5
"""More ways for a row to stand than loop.py's: the rest of its prompt is to come; inside a block, its pages are full."""


class SlotsError(ProblemsError):
    """Sizes of slots and pages that do not fit."""


class PrefillCall(NamedTuple):
    """The next tokens of a few slots: ``n`` rows, ``n / groups`` of each group in the order of groups.

    Attributes:
      slots: slot of each row, counted within the group; -1 idles the row. No slot twice.
      ids: token ids; those at ``new`` and beyond may be anything.
      start: tokens of the slot that are already in.
      new: real tokens of this call, at least 1 for a row that does not idle.
      tables: pages of the slot in order, counted within the group, -1 for none; they must hold ``start + new`` tokens.
      last: whether these tokens end the prompt, so that an id is drawn.
      budget: ids that may be drawn, the one drawn here included.
    """

    slots: Int[Array, " n"]
    ids: Int[Array, "n tokens"]
    start: Int[Array, " n"]
    new: Int[Array, " n"]
    tables: Int[Array, "n table"]
    last: Bool[Array, " n"]
    budget: Int[Array, " n"]


@dataclass(frozen=True)
class SlotSteps:
    """Compiled programs of one model over slots and pages.

    Under a layout that cuts the batch, slots, pages and checkpoints are dealt to its groups of devices in equal runs: slot
    ``s`` is of group ``s // (slots // groups)``, and page, slot and checkpoint ids in arguments count within their group.
    Arguments besides parameters and cache may be host arrays or results of these programs; neither makes another program.

    Attributes:
      steps: model, mesh and layout; its ``capacity`` bounds a sequence, its ``block`` a decode call.
      slots: sequences decoded together; a multiple of ``groups``.
      pages: pages of the pool over all groups; a multiple of ``groups``.
      page: tokens of a page; ``capacity`` is a multiple.
      checkpoints: recurrent states that can be kept besides those of the slots, over all groups; a multiple of ``groups``.
      top: likeliest ids that are reported beside a drawn one.

    Raises:
      SlotsError: sizes that do not fit each other, the layout or the kernels; names all of them.
    """

    steps: Steps
    slots: int
    pages: int
    page: int
    checkpoints: int = 0
    top: int = 20

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._page_problems()]
        if problems:
            raise SlotsError("These slots and pages cannot be used", problems)

    def _size_problems(self) -> list[str]:
        groups, vocab = self.groups, self.steps.config.vocab
        sizes = (("slots", self.slots, 1), ("pages", self.pages, 1), ("checkpoints", self.checkpoints, 0))
        problems = [
            f"{name} = {size} cannot be dealt to {groups} groups of devices equally; nearest that works: "
            f"{max(least, round(size / groups)) * groups}"
            for name, size, least in sizes
            if size < least or size % groups
        ]
        if not 1 <= self.top <= vocab:
            problems.append(f"top = {self.top}; it must be from 1 to the vocabulary's {vocab}")
        return problems

    def _page_problems(self) -> list[str]:
        capacity, parallel = self.steps.capacity, self.steps.parallel
        tile = page_unit(self.steps)
        problems = []
        works = [size for size in range(tile, capacity + 1, tile) if capacity % size == 0]
        if self.page not in works:
            nearest = min(works, key=lambda size: abs(size - self.page), default="none; change the capacity")
            tiles = f" of whole tiles of {tile}" if tile > 1 else ""
            problems.append(
                f"page = {self.page}: a sequence of {capacity} tokens must fill whole pages{tiles}; nearest that works: {nearest}"
            )
        else:
            problems += self._pool_problems()
        over = {axis: parallel.mesh_axes(axis) for axis in ("batch", "pages")}
        if over["batch"] != over["pages"]:
            problems.append(
                f'layout "{self.steps.layout.name}" cuts batch over {list(over["batch"])} and pages over {list(over["pages"])}; '
                "map both to the same mesh axes: a slot's pages lie with it"
            )
        return problems

    def _pool_problems(self) -> list[str]:
        if self.steps.implementations.mla == "reference":
            return []
        page = self.page // self.steps.parallel.size("sequence")
        shape = (self.pages // self.groups, page, self.steps.config.mla.row_dim)
        try:
            check_cache(jax.ShapeDtypeStruct(shape, self.steps.precision.latent), shape)
        except ValueError as problem:
            return [str(problem)]
        return []

    @property
    def groups(self) -> int:
        """Groups of devices that hold different sequences."""
        return self.steps.parallel.size("batch")

    @property
    def stride(self) -> int:
        """Most tokens by which a decode step lengthens a sequence."""
        return 1

    @property
    def table(self) -> int:
        """Entries of a slot's page table: pages of a full sequence."""
        return self.steps.capacity // self.page

    def describe_cache(self) -> SlotCache:
        """The cache as a tree of ArraySpec; ``steps.layout.local_bytes`` of its leaves is what a device holds."""
        sizes = (self.slots, self.pages, self.page, self.checkpoints)
        return cache_lib.describe_slots(self.steps.config, *sizes, self.steps.precision)

    def new_cache(self) -> SlotCache:
        """An empty cache, created shard by shard."""
        return jax.tree.map(self.steps.zeros, self.describe_cache(), is_leaf=is_spec)

    def neutral_extras(self, rows: int) -> Extras:
        """Extras that change nothing, as host arrays, for ``rows`` rows: all slots, or those of a prefill call."""
        return shaping.neutral(rows, self.steps.config.vocab)

    @cached_property
    def prefill(self) -> Callable[..., tuple[SlotCache, Rows, Drawn]]:
        """``(params, cache, call, sampling, extras, limits)`` -> cache, rows of the call, first drawn ids [n, 1].

        ``call`` is a PrefillCall; sampling, extras and ``limits.stops`` have a row per row of the call. One program per shape of
        ``call.ids``. Rows come back at their new position: WAITING where more of the prompt is to come, RUNNING or finished where
        an id was drawn, BROKEN where the logits after their tokens are not finite: then their state must not be kept. Rows of
        idle entries mean nothing. Donates the cache.
        """
        return self._build_prefill()

    @cached_property
    def prefill_images(self) -> Callable[..., tuple[SlotCache, Rows, Drawn]]:
        """``prefill`` with one more argument after ``call``: ImageRows [n, tokens, embed] in the activation dtype.

        A program of its own: calls without pictures need not carry any.
        """
        program = self._build_prefill(self.steps.images_spec)
        # last in the program, so that the one without pictures is the same as ever
        return lambda params, cache, call, images, *rest: program(params, cache, call, *rest, images)

    def _build_prefill(self, *images: ImageRows) -> Callable[..., Any]:
        specs = self._specs

        def body(
            params: Params,
            held: SlotCache,
            call: PrefillCall,
            sampling: Sampling,
            extras: Extras,
            limits: Limits,
            *images: Any,
        ) -> tuple[SlotCache, Rows, Drawn]:
            real = call.slots >= 0
            start, new = jnp.where(real, call.start, 0), jnp.where(real, call.new, 0)
            part = _each_kda(lambda states: cache_lib.read_states(states, call.slots), held.layers)
            model, hidden, part, context = self._read(params, call._replace(start=start, new=new), part, held, *images)
            layers = _each_kda(lambda states, some: cache_lib.write_states(states, call.slots, some), held.layers, part)
            last = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
            seen = Seen(*(array[jnp.maximum(call.slots, 0)] for array in held.seen))
            choice, top = self._draw("full", model.logits(last), limits, sampling, extras, seen, start + new)
            status = jnp.where(real & call.last, RUNNING, WAITING)
            rows, emitted = book(
                Rows(jnp.zeros_like(start), start, call.budget, status), choice, new, limits.stops, self.steps.capacity
            )
            rows = rows._replace(position=start + new, status=jnp.where(choice.finite, rows.status, BROKEN))
            held = SlotCache(layers, (), self._booked(held.seen, call.slots, choice, emitted), context)
            drawn = Drawn(jnp.where(emitted, choice.ids, -1), choice.logprobs, top)
            return held, rows, jax.tree.map(lambda array: array[:, None], drawn)

        given = (specs["call"], specs["sampling"], specs["extras"], specs["limits"], *images)
        held = specs["cache"]._replace(kept=())
        program = self._build(body, (specs["params"], held), given, (held, specs["rows"], specs["full"]))
        return keeping(program, "layers", "seen", "context")

    def _read(
        self, params: Params, call: PrefillCall, part: Cache, held: SlotCache, *images: Any
    ) -> tuple[KimiModel, Any, Cache, Any]:
        """Runs the tokens of a prefill call: the model, their hidden vectors, the cache of the call's rows, context rows."""
        model = bind(self.steps.graph, params)
        hidden, part = model(call.ids, call.start, call.new, part, call.tables, *images)
        return model, hidden, part, held.context

    def decode(self, kind: Kind) -> Callable[..., tuple[SlotCache, Rows, Drawn]]:
        """``(params, cache, tables, rows, sampling, extras, limits, steps)`` -> cache, rows, drawn ids [slots, block].

        Up to ``steps <= block`` steps of all slots on the device, until none goes on. ``tables`` [slots, table] int32 as in
        PrefillCall. Slots that are not RUNNING change nothing, whatever their tables hold. A row whose pages are full pauses:
        it stays RUNNING and draws nothing more. Donates the cache.

        Args:
          kind: equal rows draw equal ids under each kind that serves them; only ``full`` counts for penalties and reports
            alternatives.
        """
        if kind not in self._decoding:
            self._decoding[kind] = self._build_decode(kind)
        return self._decoding[kind]

    @cached_property
    def _decoding(self) -> dict[Kind, Callable[..., Any]]:
        """Decode programs that were asked for."""
        return {}

    def _build_decode(self, kind: Kind) -> Callable[..., Any]:
        specs, graph, parallel, full = self._specs, self.steps.graph, self.steps.parallel, kind == "full"

        def body(
            params: Params,
            held: SlotCache,
            tables: Any,
            rows: Rows,
            sampling: Sampling,
            extras: Extras,
            limits: Limits,
            steps: Any,
        ) -> tuple[SlotCache, Rows, Drawn]:
            model, count = bind(graph, params), tables.shape[0]
            room = self._room(tables)

            def paused(rows: Rows) -> Rows:
                waits = (rows.status == RUNNING) & (rows.position >= room)
                return rows._replace(status=jnp.where(waits, PAUSED, rows.status))

            def step(held: SlotCache, rows: Rows) -> tuple[SlotCache, Rows, Drawn]:
                goes = rows.status == RUNNING
                start = jnp.where(goes, rows.position, 0)
                hidden, layers = model(rows.token[:, None], start, goes.astype(jnp.int32), held.layers, tables)
                logits = model.logits(hidden[:, 0])
                choice, top = self._draw(kind, logits, limits, sampling, extras, held.seen, rows.position + 1)
                rows, emitted = book(rows, choice, 1, limits.stops, self.steps.capacity)
                seen = self._booked(held.seen, jnp.arange(count), choice, emitted) if full else held.seen
                drawn = Drawn(jnp.where(emitted, choice.ids, -1), choice.logprobs, top)
                return SlotCache(layers, (), seen), paused(rows), drawn

            def nothing(*shape: int) -> tuple[Any, Any]:
                return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)

            block = self.steps.block
            empty = Drawn(*nothing(count, block), Alternatives(*nothing(count, block, self.top)) if full else ())
            held, rows, drawn = run_block(step, held, paused(rows), empty, steps, parallel)
            rows = rows._replace(status=jnp.where(rows.status == PAUSED, RUNNING, rows.status))
            return held, rows, drawn

        given = (
            specs["grid"],
            specs["rows"],
            specs["sampling"],
            specs["extras"] if full else (),
            specs["limits"],
            self.steps.spec(),
        )
        held = specs["cache"]._replace(kept=()) if full else specs["cache"]._replace(kept=(), seen=())
        out = (held, specs["rows"], specs["full" if full else "drawn"])
        program = self._build(body, (specs["params"], held), given, out)
        if full:
            return keeping(program, "layers", "seen")
        run = keeping(program, "layers")
        # large, and of no use here
        return lambda params, cache, tables, rows, sampling, extras, *rest: run(
            params, cache, tables, rows, sampling, (), *rest
        )

    def _room(self, tables: Int[Array, "slots table"]) -> Int[Array, " slots"]:
        """Tokens that the pages of every slot hold."""
        missing = tables < 0
        return jnp.where(jnp.any(missing, axis=1), jnp.argmax(missing, axis=1), tables.shape[1]) * self.page

    @cached_property
    def save(self) -> Callable[[SlotCache, Any, Any], SlotCache]:
        """``(cache, slots [n], checkpoints [n])``: copies recurrent states of slots to checkpoints; -1 in either does nothing.

        One program per ``n``, a multiple of ``groups``: each group's share in the order of groups. Donates the checkpoints.
        """
        if not self.checkpoints:
            return lambda cache, slots, checkpoints: cache

        def body(states: Any, kept: Any, slots: Any, checkpoints: Any) -> Any:
            return cache_lib.copy_states(states, slots, kept, jnp.where(slots >= 0, checkpoints, -1))

        specs = self._specs
        program = self._build(body, (specs["states"], specs["kept"]), (specs["row"],) * 2, specs["kept"])
        return lambda cache, *given: cache._replace(kept=program(_kda(cache.layers), cache.kept, *given))

    @cached_property
    def restore(self) -> Callable[[SlotCache, Any, Any], SlotCache]:
        """``(cache, checkpoints [n], slots [n])``: copies checkpoints to slots; checkpoint -1 is the start of a sequence.

        Slot -1 does nothing; no slot twice. The checkpoint stays as it is. Programs as in ``save``; donates the slots' states.
        """

        def body(kept: Any, states: Any, checkpoints: Any, slots: Any) -> Any:
            if not kept:  # nothing but starts
                kept, checkpoints = states, jnp.full_like(checkpoints, -1)
            return cache_lib.copy_states(kept, checkpoints, states, slots)

        specs = self._specs
        program = self._build(body, (specs["kept"], specs["states"]), (specs["row"],) * 2, specs["states"])

        def run(cache: SlotCache, *given: Any) -> SlotCache:
            restored = iter(program(cache.kept, _kda(cache.layers), *given))
            return cache._replace(layers=_each_kda(lambda _: next(restored), cache.layers))

        return run

    @cached_property
    def count(self) -> Callable[[SlotCache, Any, Any, Any], SlotCache]:
        """``(cache, slots [n], prompt [n, vocab] bool, drawn [n, vocab] int32)``: sets what penalties of slots count from.

        Slot -1 does nothing. Once for every request with penalties, before its first draw. Programs as in ``save``.
        """

        def body(held: Seen, slots: Any, prompt: Any, drawn: Any) -> Seen:
            target = jnp.where(slots >= 0, slots, held.prompt.shape[0])
            return Seen(*(old.at[target].set(new, mode="drop") for old, new in zip(held, (prompt, drawn), strict=True)))

        specs = self._specs
        seen = specs["cache"].seen
        program = self._build(body, (seen,), (specs["row"], *seen), seen)
        return lambda cache, *given: cache._replace(seen=program(cache.seen, *given))

    def _draw(
        self, kind: Kind, logits: Any, limits: Limits, sampling: Sampling, extras: Extras, seen: Seen, positions: Any
    ) -> tuple[Choice, Any]:
        parallel, impl = self.steps.parallel, self.steps.implementations.sample
        if kind == "full":
            return sample_full(logits, limits.allowed, sampling, extras, seen, positions, parallel, top=self.top)
        random = kind == "random"
        return sample(logits, limits.allowed, sampling, positions, parallel, random=random, impl=impl), ()

    def _booked(self, seen: Seen, slots: Any, choice: Choice, emitted: Any) -> Seen:
        offset = self.steps.parallel.index("vocab") * seen.drawn.shape[1]
        return seen._replace(drawn=shaping.book(seen.drawn, slots, choice.ids, emitted, offset))

    @cached_property
    def _specs(self) -> Mapping[str, Any]:
        """Partition specs of everything that crosses the boundary of a program."""
        steps, spec = self.steps, self.steps.spec
        row, grid, deep = spec("batch"), spec("batch", None), spec("batch", None, None)
        cache = jax.tree.map(steps.layout.spec, self.describe_cache(), is_leaf=is_spec)
        return {
            "params": {name: steps.layout.spec(array) for name, array in steps.parameters.items()},
            "cache": cache,
            "states": _kda(cache.layers),
            "kept": cache.kept,
            "row": row,
            "grid": grid,
            "call": PrefillCall(row, grid, row, row, grid, row, row),
            "rows": Rows(row, row, row, row),
            "sampling": Sampling(row, row, row, row),
            "extras": Extras(row, row, row, row, grid, grid, grid),
            "limits": Limits(spec("vocab"), grid),
            "drawn": Drawn(grid, grid),
            "full": Drawn(grid, grid, Alternatives(deep, deep)),
        }

    def _build(
        self, body: Callable[..., Any], held: tuple[Any, ...], given: tuple[Any, ...], out: Any
    ) -> Callable[..., Any]:
        """A program of ``held`` arrays, of which the last is donated, and ``given`` ones, which may come from the host."""
        mesh = self.steps.mesh
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(*held, *given), out_specs=out, check_vma=False)
        options = compiler_options(platform_of_mesh(mesh))
        program = jax.jit(mapped, donate_argnums=len(held) - 1, compiler_options=options)
        placed = jax.tree.map(partial(NamedSharding, mesh), given)
        # placed first: a host array would otherwise be one program and a result of another program a second
        return lambda *arguments: program(*arguments[: len(held)], *jax.device_put(arguments[len(held) :], placed))


def page_unit(steps: Steps) -> int:
    """A page holds a multiple of so many tokens: whole kernel tiles and whole runs on each device that shares a sequence."""
    parallel = steps.parallel
    parts = parallel.size("sequence")
    tile = 1 if steps.implementations.mla == "reference" else TILE
    return parts * math.lcm(tile, parallel.interleave if parts > 1 else 1)


def keeping(program: Callable[..., Any], *fields: str) -> Callable[..., Any]:
    """The program over a whole cache: it gets and changes some fields, the others stay where they are."""

    def run(params: Params, cache: SlotCache, *given: Any) -> tuple[Any, ...]:
        none = {name: () for name in SlotCache._fields if name not in fields}
        held, *results = program(params, cache._replace(**none), *given)
        return cache._replace(**{name: getattr(held, name) for name in fields}), *results

    return run


def _each_kda(change: Callable[..., KdaCache], *caches: Cache) -> Cache:
    """``change`` of the recurrent layers; of the others, what the last cache holds."""
    return tuple(
        change(*entries) if isinstance(entries[0], KdaCache) else entries[-1] for entries in zip(*caches, strict=True)
    )


def _kda(layers: Cache) -> tuple[KdaCache, ...]:
    return tuple(entry for entry in layers if isinstance(entry, KdaCache))
