"""The programs of ``slots.SlotSteps`` for a model with a draft: many sequences in slots and pages, several tokens a step.

Context rows of the draft lie in pools of their own, in the pages that hold the latent rows of the same tokens, under one table.
A prompt that starts from shared pages finds its context there, and what is taken back and run again writes it again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax.numpy as jnp

from kimi_jax.cache import Cache, SlotCache
from kimi_jax.draft.dspark import describe_context
from kimi_jax.draft.speculate import DraftedCache, Seeded, Speculation, Tally
from kimi_jax.draft.steps import DraftedSteps
from kimi_jax.loop import RUNNING, Drawn, Limits, Rows, Steps, run_block
from kimi_jax.model import KimiModel, Params
from kimi_jax.ops.sample.api import Alternatives, Sampling
from kimi_jax.ops.sample.extras import Extras
from kimi_jax.slots import PAUSED, Kind, PrefillCall, SlotSteps, keeping

PLAIN = -1
"""Drafts of a row that is decoded as without a draft: one id a step, from all that its request asks."""


@dataclass(frozen=True)
class DraftedSlotSteps(SlotSteps):
    """``SlotSteps`` that draft and verify; ``steps`` are ``DraftedSteps``, whose ``block`` counts speculative steps."""

    def _size_problems(self) -> list[str]:
        if isinstance(self.steps, DraftedSteps):
            return super()._size_problems()
        return ["steps without a draft; give DraftedSteps"]

    @property
    def drafted(self) -> DraftedSteps:
        """``steps`` by their own type."""
        return cast(DraftedSteps, self.steps)

    @property
    def stride(self) -> int:
        return self.drafted.drafter.drafts + 1

    def describe_cache(self) -> SlotCache:
        """As without a draft, with pools of context rows."""
        sizes = self.drafted.drafter.sizes
        context = describe_context(sizes, self.pages, self.page, self.steps.precision, paged=True)
        return super().describe_cache()._replace(context=context)

    def _read(
        self, params: Params, call: PrefillCall, part: Cache, held: SlotCache, *images: Any
    ) -> tuple[KimiModel, Any, Cache, Any]:
        """Also writes the context rows of the call's tokens."""
        steps = self.drafted
        model, draft = steps.bound(params)
        image = images[0] if images else None
        hidden, taps, after = model.tapped(
            call.ids, call.start, call.new, part, steps.taps, pages=call.tables, images=image
        )
        context = draft.write(draft.fuse(taps), call.start, call.new, held.context, call.tables)
        return model, hidden, cast(Cache, after), context

    def decode(self, kind: Kind) -> Callable[..., tuple[SlotCache, Rows, Drawn]]:
        """``(params, cache, tables, rows, sampling, extras, limits, steps, drafts)`` -> cache, rows, [slots, block * stride] ids.

        As without a draft, by speculative steps. ``drafts`` [slots] int32 bounds how many of its drafts a row has verified;
        PLAIN rows, which only ``full`` serves, draw one id a step as without a draft, and only they may ask for extras. A row
        pauses where its pages have no room for its whole next block, so that its blocks do not depend on how pages are dealt.
        Between ids of a row there may be -1; ``Drawn.drafts`` is the Tally of the call.

        Args:
          kind: as without a draft; equal rows draw equal ids under each kind that serves them.
        """
        return super().decode(kind)

    def _build_decode(self, kind: Kind) -> Callable[..., Any]:
        specs, parallel, full = self._specs, self.steps.parallel, kind == "full"

        def body(
            params: Params,
            held: SlotCache,
            tables: Any,
            rows: Rows,
            sampling: Sampling,
            extras: Extras,
            limits: Limits,
            steps: Any,
            drafts: Any,
        ) -> tuple[SlotCache, Rows, Drawn]:
            count, block, width = tables.shape[0], self.steps.block, self.stride
            made = self.drafted.speculation(params, random=kind != "greedy")
            speculation, room = replace(made, pages=tables, most=drafts), self._room(tables)

            def paused(rows: Rows) -> Rows:
                waits = (rows.status == RUNNING) & (rows.position + speculation.lengths(rows) + 1 > room)
                return rows._replace(status=jnp.where(waits, PAUSED, rows.status))

            def step(carried: tuple[SlotCache, Tally], rows: Rows) -> tuple[tuple[SlotCache, Tally], Rows, Drawn]:
                held, tally = carried
                cache = DraftedCache(held.layers, held.context, tally)
                if full:
                    cache, after, drawn, seen = self._step_full(
                        speculation, cache, held.seen, rows, sampling, extras, limits
                    )
                else:
                    cache, after, drawn = speculation.step(cache, rows, sampling, limits)
                    seen = held.seen
                return (SlotCache(cache.target, (), seen, cache.context), cache.tally), paused(after), drawn

            def nothing(*shape: int) -> tuple[Any, Any]:
                return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)

            top = Alternatives(*nothing(count, block, width, self.top)) if full else ()
            empty = Drawn(*nothing(count, block, width), top)
            none = Tally(jnp.zeros((count, width), jnp.int32), jnp.zeros(count, jnp.int32))
            (held, tally), rows, drawn = run_block(step, (held, none), paused(rows), empty, steps, parallel)
            rows = rows._replace(status=jnp.where(rows.status == PAUSED, RUNNING, rows.status))
            flat = lambda array: array.reshape(count, block * width, *array.shape[3:])  # noqa: E731
            top = Alternatives(*map(flat, drawn.top)) if full else ()
            return held, rows, Drawn(flat(drawn.ids), flat(drawn.logprobs), top, tally)

        given = (
            specs["grid"],
            specs["rows"],
            specs["sampling"],
            specs["extras"] if full else (),
            specs["limits"],
            self.steps.spec(),
            specs["row"],
        )
        held = specs["cache"]._replace(kept=()) if full else specs["cache"]._replace(kept=(), seen=())
        told = specs["full" if full else "drawn"]._replace(drafts=Tally(specs["grid"], specs["row"]))
        program = self._build(body, (specs["params"], held), given, (held, specs["rows"], told))
        if full:
            return keeping(program, "layers", "seen", "context")
        run = keeping(program, "layers", "context")
        # large, and of no use here
        return lambda params, cache, tables, rows, sampling, extras, *rest: run(
            params, cache, tables, rows, sampling, (), *rest
        )

    def _step_full(
        self,
        speculation: Speculation,
        cache: DraftedCache,
        seen: Any,
        rows: Rows,
        sampling: Sampling,
        extras: Extras,
        limits: Limits,
    ) -> tuple[DraftedCache, Rows, Drawn, Any]:
        """A step in which PLAIN rows take the id that they would draw without a draft."""
        assert speculation.most is not None
        draws, plain = Seeded(sampling.seed, rows.position), speculation.most == PLAIN
        verified = speculation.verify(cache, rows, sampling, limits, draws)
        verdict = speculation.judge(verified.logits, verified.proposal, verified.lengths, sampling, limits, draws)
        choice, top = self._draw("full", verified.logits[:, 0], limits, sampling, extras, seen, rows.position + 1)
        first = lambda old, new: old.at[:, 0].set(jnp.where(plain, new, old[:, 0]))  # noqa: E731
        verdict = verdict._replace(
            tokens=first(verdict.tokens, choice.ids),
            logprobs=first(verdict.logprobs, choice.logprobs),
            finite=first(verdict.finite, choice.finite),
        )
        before = cache.tally
        cache, after, drawn = speculation.settle(cache, rows, verified, verdict, limits)
        tally = Tally(
            jnp.where(plain[:, None], before.stayed, cache.tally.stayed),
            jnp.where(plain, before.verified, cache.tally.verified),
        )
        counted = plain & (drawn.ids[:, 0] >= 0)
        seen = self._booked(seen, jnp.arange(len(plain)), choice, counted)
        ids, logprobs = (
            jnp.full((*drawn.ids.shape, self.top), -1, jnp.int32),
            jnp.zeros((*drawn.ids.shape, self.top), jnp.float32),
        )
        alternatives = Alternatives(ids.at[:, 0].set(top.ids), logprobs.at[:, 0].set(top.logprobs))
        return cache._replace(tally=tally), after, drawn._replace(top=alternatives), seen


def slot_steps(steps: Steps, slots: int, pages: int, page: int, checkpoints: int = 0) -> SlotSteps:
    """The programs of a model over slots and pages, which speculate where it has a draft.

    Raises:
      SlotsError: as the programs do.
    """
    made = DraftedSlotSteps if isinstance(steps, DraftedSteps) else SlotSteps
    return made(steps, slots, pages, page, checkpoints)
