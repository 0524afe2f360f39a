"""The compiled programs of a model with a draft: those of ``loop.Steps`` with another cache and another decode step.

Prompts are run by the target as before; their tapped vectors become context rows of the draft chunk by chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimi_jax import cache as cache_lib
from kimi_jax.draft.accept import Rule
from kimi_jax.draft.config import GqaSizes
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.dspark import Dspark, describe_context, draft_parameters
from kimi_jax.draft.speculate import DraftedCache, Seeded, Speculation, Tally
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.layers.taps import Taps
from kimi_jax.loop import Drawn, Limits, Rows, Steps, book, run_block
from kimi_jax.model import Params, bind
from kimi_jax.ops.sample.api import Sampling, sample
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout

PREFIX = "draft."
"""Of a draft's parameters beside the target's."""

COUNTS = np.dtype(np.int32)


@dataclass(frozen=True)
class DraftedSteps(Steps):
    """``loop.Steps`` that draft and verify.

    ``block`` counts speculative steps; a decode call reports up to ``block * (drafts + 1)`` ids a row.

    Attributes:
      drafter: the draft.
      rule: of acceptance for rows with a temperature.
    """

    drafter: DraftSpec = field(kw_only=True)
    rule: Rule = field(default="block", kw_only=True)

    @property
    def parameters(self) -> dict[str, ArraySpec]:
        """Those of the target, and those of the draft behind a prefix."""
        drafts = draft_parameters(self.drafter.sizes, self.precision)
        return {**super().parameters, **{PREFIX + name: spec for name, spec in drafts.items()}}

    @cached_property
    def _draft_graph(self) -> nnx.GraphDef[Dspark]:
        return nnx.split(Dspark(self.drafter.sizes, self.precision, self.drafter.rope, self.parallel))[0]

    def without_draft(self) -> Steps:
        """The programs of the target alone."""
        return Steps(**{part.name: getattr(self, part.name) for part in fields(Steps)})

    @property
    def taps(self) -> Taps:
        return Taps(self.drafter.taps, self.drafter.stream)

    def describe_cache(self, batch: int) -> Any:
        """The target's cache, the context rows of the draft, and the tally."""
        context = describe_context(self.drafter.sizes, batch, self.capacity, self.precision)
        stayed = ArraySpec((batch, self.drafter.drafts + 1), COUNTS, ("batch", None))
        tally = Tally(stayed, ArraySpec((batch,), COUNTS, ("batch",)))  # pyright: ignore[reportArgumentType]
        return DraftedCache(super().describe_cache(batch), context, tally)  # pyright: ignore[reportArgumentType]

    @cached_property
    def reset(self) -> Callable[..., Any]:
        """As for the target; context rows need no clearing, since nothing past a sequence's length is read."""
        specs = self._specs

        def body(cache: DraftedCache, fresh: Any) -> DraftedCache:
            clear = lambda counts: jnp.where(fresh.reshape(-1, *[1] * (counts.ndim - 1)), 0, counts)  # noqa: E731
            return DraftedCache(cache_lib.reset(cache.target, fresh), cache.context, Tally(*map(clear, cache.tally)))

        return self._map(body, (specs["cache"], specs["row"]), specs["cache"], donate=(0,))

    def bound(self, params: Params) -> tuple[Any, Dspark]:
        """Target and draft over their arrays."""
        model = bind(self.graph, {name: array for name, array in params.items() if not name.startswith(PREFIX)})
        own = {name.removeprefix(PREFIX): array for name, array in params.items() if name.startswith(PREFIX)}
        flat = [(tuple(int(p) if p.isdigit() else p for p in n.split(".")), nnx.Param(a)) for n, a in own.items()]
        return model, nnx.merge(self._draft_graph, nnx.from_flat_state(flat))

    def _read(
        self, params: Params, cache: DraftedCache, ids: Any, starts: Any, new: Any, *images: Any
    ) -> tuple[Any, Any, DraftedCache]:
        """Runs prompt tokens through the target and writes their context rows."""
        model, draft = self.bound(params)
        image = images[0] if images else None
        hidden, taps, target = model.tapped(ids, starts, new, cache.target, self.taps, images=image)
        context = draft.write(draft.fuse(taps), starts, new, cache.context)
        return model, hidden, DraftedCache(target, context, cache.tally)

    def _build_score(self, *images: ImageRows) -> Callable[..., Any]:
        specs = self._specs

        def body(params: Params, cache: DraftedCache, ids: Any, starts: Any, new: Any, *images: Any) -> Any:
            model, _ = self.bound(params)
            hidden, target = model(ids, starts, new, cache.target, None, *images)
            return model.logits(hidden), cache._replace(target=target)

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["row"], *images)
        return self._map(body, inputs, (specs["scores"], specs["cache"]), donate=(1,))

    def _build_extend(self, *images: ImageRows) -> Callable[..., Any]:
        specs = self._specs

        def body(params: Params, cache: DraftedCache, ids: Any, starts: Any, new: Any, *images: Any) -> DraftedCache:
            return self._read(params, cache, ids, starts, new, *images)[2]

        inputs = (specs["params"], specs["cache"], specs["grid"], specs["row"], specs["row"], *images)
        return self._map(body, inputs, specs["cache"], donate=(1,))

    def _build_prefill(self, *images: ImageRows, random: bool) -> Callable[..., Any]:
        specs = self._specs

        def body(
            params: Params,
            cache: DraftedCache,
            ids: Any,
            new: Any,
            rows: Rows,
            sampling: Sampling,
            limits: Limits,
            *images: Any,
        ) -> tuple[DraftedCache, Rows, Drawn]:
            model, hidden, cache = self._read(params, cache, ids, rows.position, new, *images)
            last = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
            choice = sample(
                model.logits(last),
                limits.allowed,
                sampling,
                rows.position + new,
                self.parallel,
                random=random,
                impl=self.implementations.sample,
            )
            rows, emitted = book(rows, choice, new, limits.stops, self.capacity)
            drawn = jnp.where(emitted, choice.ids, -1)
            return cache, rows, Drawn(drawn[:, None], choice.logprobs[:, None])

        inputs = (
            *(specs[name] for name in ("params", "cache", "grid", "row", "rows", "sampling", "limits")),
            *images,
        )
        outputs = (specs["cache"], specs["rows"], Drawn(specs["grid"], specs["grid"]))
        return self._map(body, inputs, outputs, donate=(1,))

    def _build_decode(self, *, random: bool) -> Callable[..., Any]:
        specs, width = self._specs, self.drafter.drafts + 1

        def body(
            params: Params, cache: DraftedCache, rows: Rows, sampling: Sampling, limits: Limits, steps: Any
        ) -> tuple[DraftedCache, Rows, Drawn]:
            speculation = self.speculation(params, random=random)
            count = rows.token.shape[0]

            def step(cache: DraftedCache, rows: Rows) -> tuple[DraftedCache, Rows, Drawn]:
                return speculation.step(cache, rows, sampling, limits, Seeded(sampling.seed, rows.position))

            shape = (count, self.block, width)
            nothing = Drawn(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
            cache, rows, drawn = run_block(step, cache, rows, nothing, steps, self.parallel)
            return cache, rows, Drawn(drawn.ids.reshape(count, -1), drawn.logprobs.reshape(count, -1))

        inputs = (*(specs[name] for name in ("params", "cache", "rows", "sampling", "limits")), self.spec())
        outputs = (specs["cache"], specs["rows"], Drawn(specs["grid"], specs["grid"]))
        return self._map(body, inputs, outputs, donate=(1,))

    def speculation(self, params: Params, *, random: bool) -> Speculation:
        """The parts of a step, for code inside ``shard_map``."""
        model, draft = self.bound(params)
        return Speculation(
            model, draft, self.drafter, self.parallel, self.capacity, self.rule, random, self.implementations.sample
        )


def with_draft_axes(layout: Layout, spec: DraftSpec) -> Layout:
    """The layout with the draft's heads and MLPs cut as the target's heads are, where they divide; else they stay whole.

    A layout that names these axes itself stays as it is.
    """
    over, parts, sizes = layout.mesh_axes("heads"), layout.parts("heads"), spec.sizes
    attention = sizes.attention
    heads = attention.kv_heads if isinstance(attention, GqaSizes) else attention.heads
    fits = {"draft_heads": heads, "draft_ffn": sizes.ffn}
    added: Mapping[str, Any] = {
        axis: over for axis, size in fits.items() if axis not in layout.axes and size % parts == 0
    }
    return replace(layout, axes={**layout.axes, **added}) if added else layout
