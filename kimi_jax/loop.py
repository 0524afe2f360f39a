"""Jitted steps over a mesh: prefill, teacher-forced logits, and an on-device block of decode steps.

The whole step runs in one ``jax.shard_map`` over all mesh axes; layers see local shards and write their own collectives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from kimi_jax import cache as cache_lib
from kimi_jax.cache import Cache
from kimi_jax.config import KimiConfig
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.model import Graph, Params, abstract, bind
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.sample.api import Alternatives, Sampling, sample
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.compiler import compiler_options, platform_of_mesh
from kimi_jax.placement.layout import Layout
from kimi_jax.precision import FLOAT32, Precision

RUNNING, STOPPED, LENGTH, BROKEN = 0, 1, 2, 3
"""How a row stands: still going, drew a stop id, reached a limit, or its logits were not finite."""


class Rows(NamedTuple):
    """What decoding carries for each row of the batch.

    Attributes:
      token: last drawn id; not yet in the cache.
      position: tokens in the cache, which is where ``token`` goes.
      budget: ids that may still be drawn.
      status: one of RUNNING, STOPPED, LENGTH, BROKEN; idle rows are not RUNNING.
    """

    token: Int[Array, " rows"]
    position: Int[Array, " rows"]
    budget: Int[Array, " rows"]
    status: Int[Array, " rows"]


class Drawn(NamedTuple):
    """Ids drawn by a block, [rows, steps], -1 where a row drew nothing, with their log-probabilities.

    ``top``: the likeliest ids of every step where they were asked for. ``drafts``: what became of each row's drafts, where there
    is a draft (``draft.speculate.Tally``).
    """

    ids: Int[Array, "rows steps"]
    logprobs: Float[Array, "rows steps"]
    top: Alternatives | tuple[()] = ()
    drafts: Any = ()


class Limits(NamedTuple):
    """What may be drawn, and what ends a row: ``allowed`` [vocab]; ``stops`` [rows, slots] ids, -1 for an empty slot."""

    allowed: Bool[Array, " vocab"]
    stops: Int[Array, "rows slots"]


def book(rows: Rows, choice: Any, fed: Any, stops: Any, capacity: int) -> tuple[Rows, Any]:
    """Books one drawn id per active row: stop ids, then the budget, then the end of the cache."""
    active = rows.status == RUNNING
    position = rows.position + jnp.where(active, fed, 0)
    budget = rows.budget - active.astype(jnp.int32)
    stopped = jnp.any(choice.ids[:, None] == stops, axis=-1)
    full = (budget <= 0) | (position >= capacity)
    verdict = jnp.where(stopped, STOPPED, jnp.where(full, LENGTH, RUNNING))
    status = jnp.where(active, jnp.where(choice.finite, verdict, BROKEN), rows.status)
    emitted = active & choice.finite
    return Rows(jnp.where(emitted, choice.ids, rows.token), position, budget, status.astype(jnp.int32)), emitted


def run_block(
    step: Callable[[Any, Rows], tuple[Any, Rows, Drawn]],
    state: Any,
    rows: Rows,
    nothing: Drawn,
    steps: Any,
    parallel: Parallel,
) -> tuple[Any, Rows, Drawn]:
    """Repeats ``step`` on the device until no row is RUNNING or ``steps`` are done.

    Args:
      step: ``(state, rows)`` -> state, rows, what each row drew, [rows].
      nothing: what is reported of steps that do not happen; its width is the most steps.
    """
    block = nothing.ids.shape[1]

    def anyone(rows: Rows) -> Any:
        # the same on every device: a loop with collectives must end everywhere at once
        return parallel.psum(jnp.sum(rows.status == RUNNING), "batch") > 0

    def turn(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, _, state, rows, drawn = carry
        state, rows, column = step(state, rows)

        def add(held: Any, new: Any) -> Any:
            return jax.lax.dynamic_update_slice(held, new[:, None], (0, index, *[0] * (held.ndim - 2)))

        return index + 1, anyone(rows), state, rows, jax.tree.map(add, drawn, column)

    start = (jnp.int32(0), anyone(rows), state, rows, nothing)
    *_, state, rows, drawn = jax.lax.while_loop(lambda c: (c[0] < jnp.minimum(steps, block)) & c[1], turn, start)
    return state, rows, drawn


@dataclass(frozen=True)
class Steps:
    """The compiled programs of one model on one mesh.

    Attributes:
      mesh: an abstract one for programs that are only lowered.
      capacity: tokens a sequence can hold; a full cache ends a row, never overwrites one.
      block: most decode steps between two reads by the host.
      impls: what each op runs; None lets the platform of the mesh decide.
    """

    config: KimiConfig
    layout: Layout
    mesh: Mesh | AbstractMesh
    precision: Precision
    capacity: int
    block: int = 16
    impls: Implementations | None = None

    @cached_property
    def parallel(self) -> Parallel:
        return Parallel.of(self.layout)

    @property
    def implementations(self) -> Implementations:
        """What each op of these programs runs."""
        return self.impls or Implementations.of(platform_of_mesh(self.mesh))

    @cached_property
    def _abstract(self) -> tuple[Graph, dict[str, ArraySpec]]:
        return abstract(self.config, self.precision, self.parallel, self.implementations)

    @property
    def graph(self) -> Graph:
        """The model without its parameters."""
        return self._abstract[0]

    @property
    def parameters(self) -> dict[str, ArraySpec]:
        """Every parameter before placement."""
        return self._abstract[1]

    def describe_cache(self, batch: int) -> Cache:
        return cache_lib.describe(self.config, batch, self.layout.held_positions(self.capacity), self.precision)

    def new_cache(self, batch: int) -> Cache:
        """An empty cache, created shard by shard."""
        return jax.tree.map(self.zeros, self.describe_cache(batch), is_leaf=is_spec)

    def zeros(self, spec: ArraySpec) -> Array:
        """An array of zeros where the layout places it."""
        return _filler(spec.shape, spec.dtype, NamedSharding(self.mesh, self.layout.spec(spec)))()

    def _map(self, body: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...]) -> Callable[..., Any]:
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        options = compiler_options(platform_of_mesh(self.mesh))
        return jax.jit(mapped, donate_argnums=donate, compiler_options=options)

    def spec(self, *axes: str | None) -> Any:
        """The partition spec of an array with these named axes."""
        return self.layout.spec(ArraySpec((1,) * len(axes), FLOAT32, axes))

    @property
    def images_spec(self) -> ImageRows:
        """Partition specs of the image rows of a call: cut like its rows, whole vectors."""
        return ImageRows(self.spec("batch", None, None), self.spec("batch", None))

    @cached_property
    def _specs(self) -> Mapping[str, Any]:
        """Partition specs of everything that crosses the boundary of a step."""
        row = self.spec("batch")
        return {
            "params": {name: self.layout.spec(spec) for name, spec in self.parameters.items()},
            "cache": jax.tree.map(self.layout.spec, self.describe_cache(1), is_leaf=is_spec),
            "row": row,
            "grid": self.spec("batch", None),
            "rows": Rows(row, row, row, row),
            "sampling": Sampling(row, row, row, row),
            "limits": Limits(self.spec("vocab"), self.spec("batch", None)),
            "scores": self.spec("batch", None, "vocab"),
            "images": self.images_spec,
        }

    @cached_property
    def reset(self) -> Callable[[Cache, Any], Cache]:
        """``reset(cache, fresh)``: rows marked fresh start a new sequence. Donates the cache."""
        specs = self._specs
        return self._map(cache_lib.reset, (specs["cache"], specs["row"]), specs["cache"], donate=(0,))

    @cached_property
    def score(self) -> Callable[..., tuple[Array, Cache]]:
        """``score(params, cache, ids, starts, new)`` -> float32 logits [rows, tokens, vocab], cache. Donates the cache."""
        return self._build_score()

    @cached_property
    def score_images(self) -> Callable[..., tuple[Array, Cache]]:
        """``score`` with a last argument: ImageRows in the activation dtype."""
        return self._build_score(self._specs["images"])

    def _build_score(self, *images: ImageRows) -> Callable[..., tuple[Array, Cache]]:
        specs, graph = self._specs, self.graph

        def body(params: Params, cache: Cache, ids: Any, starts: Any, new: Any, *images: Any) -> tuple[Any, Cache]:
            model = bind(graph, params)
            hidden, cache = model(ids, starts, new, cache, None, *images)
            return model.logits(hidden), cache

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["row"], *images)
        return self._map(body, inputs, (specs["scores"], specs["cache"]), donate=(1,))

    @cached_property
    def extend(self) -> Callable[..., Cache]:
        """``extend(params, cache, ids, starts, new)`` -> cache with these tokens in, nothing drawn. Donates the cache."""
        return self._build_extend()

    @cached_property
    def extend_images(self) -> Callable[..., Cache]:
        """``extend`` with a last argument: ImageRows in the activation dtype."""
        return self._build_extend(self._specs["images"])

    def _build_extend(self, *images: ImageRows) -> Callable[..., Cache]:
        specs, graph = self._specs, self.graph

        def body(params: Params, cache: Cache, ids: Any, starts: Any, new: Any, *images: Any) -> Cache:
            return bind(graph, params)(ids, starts, new, cache, None, *images)[1]

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["row"], *images)
        return self._map(body, inputs, specs["cache"], donate=(1,))

    def prefill(self, *, random: bool) -> Callable[..., tuple[Cache, Rows, Drawn]]:
        """``(params, cache, ids, new, rows, sampling, limits)`` -> cache, rows, first drawn id.

        Runs the last chunk of each prompt from ``rows.position`` and draws for rows that are RUNNING and have new tokens.
        """
        return self._prefill_random if random else self._prefill_greedy

    def prefill_images(self, *, random: bool) -> Callable[..., tuple[Cache, Rows, Drawn]]:
        """``prefill`` with a last argument: ImageRows in the activation dtype."""
        return self._prefill_images_random if random else self._prefill_images_greedy

    @cached_property
    def _prefill_greedy(self) -> Callable[..., Any]:
        return self._build_prefill(random=False)

    @cached_property
    def _prefill_random(self) -> Callable[..., Any]:
        return self._build_prefill(random=True)

    @cached_property
    def _prefill_images_greedy(self) -> Callable[..., Any]:
        return self._build_prefill(self._specs["images"], random=False)

    @cached_property
    def _prefill_images_random(self) -> Callable[..., Any]:
        return self._build_prefill(self._specs["images"], random=True)

    def _build_prefill(self, *images: ImageRows, random: bool) -> Callable[..., Any]:
        specs, graph, capacity = self._specs, self.graph, self.capacity
        draw = partial(sample, parallel=self.parallel, random=random, impl=self.implementations.sample)

        def body(
            params: Params,
            cache: Cache,
            ids: Any,
            new: Any,
            rows: Rows,
            sampling: Sampling,
            limits: Limits,
            *images: Any,
        ) -> tuple[Cache, Rows, Drawn]:
            model = bind(graph, params)
            hidden, cache = model(ids, rows.position, new, cache, None, *images)
            last = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
            position = rows.position + new
            choice = draw(model.logits(last), limits.allowed, sampling, position)
            rows, emitted = book(rows, choice, new, limits.stops, capacity)
            ids = jnp.where(emitted, choice.ids, -1)
            return cache, rows, Drawn(ids[:, None], choice.logprobs[:, None])

        inputs = (
            specs["params"],
            specs["cache"],
            specs["grid"],
            specs["row"],
            specs["rows"],
            specs["sampling"],
            specs["limits"],
            *images,
        )
        outputs = (specs["cache"], specs["rows"], Drawn(specs["grid"], specs["grid"]))
        return self._map(body, inputs, outputs, donate=(1,))

    def decode(self, *, random: bool) -> Callable[..., tuple[Cache, Rows, Drawn]]:
        """``(params, cache, rows, sampling, limits, steps)`` -> cache, rows, drawn ids of up to ``steps <= block`` steps.

        Runs on the device until every row is finished or ``steps`` are done; the cache is donated.
        """
        return self._decode_random if random else self._decode_greedy

    @cached_property
    def _decode_greedy(self) -> Callable[..., Any]:
        return self._build_decode(random=False)

    @cached_property
    def _decode_random(self) -> Callable[..., Any]:
        return self._build_decode(random=True)

    def _build_decode(self, *, random: bool) -> Callable[..., Any]:
        specs, graph, parallel, capacity, block = (
            self._specs,
            self.graph,
            self.parallel,
            self.capacity,
            self.block,
        )
        draw = partial(sample, parallel=parallel, random=random, impl=self.implementations.sample)

        def body(
            params: Params, cache: Cache, rows: Rows, sampling: Sampling, limits: Limits, steps: Any
        ) -> tuple[Cache, Rows, Drawn]:
            model = bind(graph, params)
            count = rows.token.shape[0]

            def step(cache: Cache, rows: Rows) -> tuple[Cache, Rows, Drawn]:
                new = (rows.status == RUNNING).astype(jnp.int32)
                hidden, cache = model(rows.token[:, None], rows.position, new, cache)
                choice = draw(model.logits(hidden[:, 0]), limits.allowed, sampling, rows.position + 1)
                rows, emitted = book(rows, choice, 1, limits.stops, capacity)
                return cache, rows, Drawn(jnp.where(emitted, choice.ids, -1), choice.logprobs)

            nothing = Drawn(jnp.full((count, block), -1, jnp.int32), jnp.zeros((count, block), jnp.float32))
            return run_block(step, cache, rows, nothing, steps, parallel)

        inputs = (specs["params"], specs["cache"], specs["rows"], specs["sampling"], specs["limits"], self.spec())
        outputs = (specs["cache"], specs["rows"], Drawn(specs["grid"], specs["grid"]))
        return self._map(body, inputs, outputs, donate=(1,))


@lru_cache(maxsize=64)
def _filler(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[[], Array]:
    """A program that makes zeros in place; kept, since layers and later caches need the same few again."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


def is_spec(value: Any) -> bool:
    """Whether a tree of descriptions ends here."""
    return isinstance(value, ArraySpec)
