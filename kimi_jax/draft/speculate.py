"""One speculative step of a batch, on the device: draft, verify, accept, commit (DSpark notes, section 1).

The draft comes first here, so that nothing of a block outlives its step. Rows differ in length and in what they accept; nothing
branches on either. Runs inside ``shard_map``; scores of the vocabulary are gathered once for a draft and once for a random verdict.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.cache import Cache, KdaCache
from kimi_jax.draft import accept
from kimi_jax.draft.accept import Rule
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.dspark import Context, Dspark
from kimi_jax.draft.markov import Drafted
from kimi_jax.layers.taps import Taps
from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Drawn, Limits, Rows
from kimi_jax.model import HeldCache, KimiModel
from kimi_jax.ops.kda import rollback
from kimi_jax.ops.sample import noise as sample_noise
from kimi_jax.ops.sample import threshold
from kimi_jax.ops.sample.api import GREEDY_BELOW, Choice, Sampling, sample
from kimi_jax.placement.collectives import Parallel

DRAFT, ACCEPT, FINAL = 1, 2, 3
"""Purposes of random numbers: no two may share any."""


class Tally(NamedTuple):
    """What became of each row's drafts: steps by how many of theirs stayed, and how many were verified in all."""

    stayed: Int[Array, "rows drafts_and_none"]
    verified: Int[Array, " rows"]


class DraftedCache(NamedTuple):
    """What a sequence leaves behind: the target's cache, the draft's context rows, and the tally."""

    target: Cache
    context: Context
    tally: Tally


class Draws(Protocol):
    """Random choices of one step."""

    def draft(self, place: int, q: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
        """Drafted ids of one place of the block, by their weights."""
        ...

    def uniforms(self, drafts: int) -> Float[Array, "rows drafts"]:
        """What acceptance is decided with."""
        ...

    def final(self, weights: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
        """The id after the accepted ones."""
        ...


@dataclass(frozen=True)
class Seeded:
    """Choices that depend on a request's seed and on the place of the step alone, not on batch, layout or scheduling.

    A number belongs to the step's anchor and a place in its block. A place in the sequence would not do: what a verdict has looked
    at and rejected must not be used again by the next step, and the block rule looks at the whole block.
    """

    seeds: UInt32[Array, " rows"]
    anchors: Int[Array, " rows"]

    def draft(self, place: int, q: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
        return accept.gumbel_max(q, self._gumbel(DRAFT, place, q.shape[-1]))

    def uniforms(self, drafts: int) -> Float[Array, "rows drafts"]:
        bits = jax.vmap(lambda key: threefry_2x32(key, jnp.arange(2 * drafts, dtype=jnp.uint32))[:drafts])
        words = bits(self._keys(ACCEPT))
        return (words >> 8).astype(jnp.float32) * 2.0**-24 + 2.0**-25

    def final(self, weights: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
        return accept.gumbel_max(weights, self._gumbel(FINAL, 0, weights.shape[-1]))

    def _keys(self, purpose: int) -> UInt32[Array, "rows two"]:
        def row(seed: Array, anchor: Array) -> Array:
            counts = jnp.stack([anchor.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])
            return threefry_2x32(jnp.stack([seed, jnp.uint32(purpose)]), counts)

        return jax.vmap(row)(self.seeds.astype(jnp.uint32), self.anchors)

    def _gumbel(self, purpose: int, place: int, width: int) -> Float[Array, "rows width"]:
        keys = self._keys(purpose)
        return sample_noise.gumbel(keys[:, 0], (keys[:, 1] + jnp.uint32(place)), 0, width)


class Verdict(NamedTuple):
    """What verification says: ids that may follow one another, how many drafts stay, and what is known of each id."""

    tokens: Int[Array, "rows drafts_and_one"]
    kept: Int[Array, " rows"]
    logprobs: Float[Array, "rows drafts_and_one"]
    finite: Bool[Array, "rows drafts_and_one"]


class Proposal(NamedTuple):
    """A block as verification takes it: ids, -1 where nothing could be drafted; what each was drawn from; how sure the draft is."""

    tokens: Int[Array, "rows drafts"]
    q: Float[Array, "rows drafts vocab"] | None
    drafted: Drafted


class Verified(NamedTuple):
    """A block of which the target has looked at ``lengths`` drafts, before any verdict: scores, and what a commit needs."""

    logits: Float[Array, "rows drafts_and_one local_vocab"]
    proposal: Proposal
    lengths: Int[Array, " rows"]
    taps: Float[Array, "rows drafts_and_one taps embed"]
    held: HeldCache


@dataclass(frozen=True)
class Speculation:
    """The parts of a speculative step that do not change from one to the next.

    Attributes:
      model, draft: over their arrays.
      spec: what the draft's checkpoint says.
      parallel: how named axes are cut.
      capacity: tokens a sequence can hold.
      rule: of acceptance, where rows have a temperature.
      random: whether any row may have one.
      impl: what the greedy choice runs.
      pages: for each row the pages of its latent and context rows, in order, where the cache has pools of pages.
      most: drafts of each row that may be verified; all where omitted. What it depends on must be known before the block is drawn.
    """

    model: KimiModel
    draft: Dspark
    spec: DraftSpec
    parallel: Parallel
    capacity: int
    rule: Rule
    random: bool
    impl: str = "reference"
    pages: Int[Array, "rows table"] | None = None
    most: Int[Array, " rows"] | None = None

    @property
    def taps(self) -> Taps:
        return Taps(self.spec.taps, self.spec.stream)

    def step(
        self, cache: DraftedCache, rows: Rows, sampling: Sampling, limits: Limits, draws: Draws | None = None
    ) -> tuple[DraftedCache, Rows, Drawn]:
        """Drafts a block for every running row and commits what stays and the id after it.

        Returns:
          The cache, the rows, and what each row emitted: [rows, drafts + 1] ids, -1 behind the last.
        """
        draws = draws or Seeded(sampling.seed, rows.position)
        verified = self.verify(cache, rows, sampling, limits, draws)
        verdict = self.judge(verified.logits, verified.proposal, verified.lengths, sampling, limits, draws)
        return self.settle(cache, rows, verified, verdict, limits)

    def verify(self, cache: DraftedCache, rows: Rows, sampling: Sampling, limits: Limits, draws: Draws) -> Verified:
        """Drafts a block for every running row and has the target look at it."""
        proposal = self.propose(rows, cache.context, sampling, limits, draws)
        lengths = self.lengths(rows)
        fed = jnp.concatenate([rows.token[:, None], jnp.maximum(proposal.tokens, 0)], axis=1)
        new = jnp.where(rows.status == RUNNING, lengths + 1, 0)
        hidden, taps, held = self.model.tapped(
            fed, rows.position, new, cache.target, self.taps, pages=self.pages, held=True
        )
        return Verified(self.model.logits(hidden), proposal, lengths, taps, held)

    def settle(
        self, cache: DraftedCache, rows: Rows, verified: Verified, verdict: Verdict, limits: Limits
    ) -> tuple[DraftedCache, Rows, Drawn]:
        """Commits what a verdict keeps; results as of :meth:`step`."""
        after, emitted, counts = book_block(rows, verdict, limits.stops, self.capacity)
        context = self.draft.write(self.draft.fuse(verified.taps), rows.position, counts, cache.context, self.pages)
        tally = _count(cache.tally, verdict.kept, emitted, jnp.where(rows.status == RUNNING, verified.lengths, 0))
        drawn = Drawn(jnp.where(emitted, verdict.tokens, -1), verdict.logprobs)
        return DraftedCache(commit(verified.held, counts, self.model.impls.kda), context, tally), after, drawn

    def lengths(self, rows: Rows) -> Int[Array, " rows"]:
        """Drafts to verify: no more than the cache and the budget have room for."""
        room = jnp.minimum(self.capacity - 1 - rows.position, rows.budget - 1)
        room = room if self.most is None else jnp.minimum(room, self.most)
        return jnp.clip(room, 0, self.spec.drafts).astype(jnp.int32)

    def propose(self, rows: Rows, context: Context, sampling: Sampling, limits: Limits, draws: Draws) -> Proposal:
        """One pass of the draft over the anchor and its mask ids, then the ids one by one."""
        mask = jnp.full((rows.token.shape[0], self.spec.drafts - 1), self.spec.mask_id, jnp.int32)
        embedded = self.model.model.embed_tokens(jnp.concatenate([rows.token[:, None], mask], axis=1))
        hidden = self.draft.block(embedded, rows.position, context, self.pages)
        base = self.parallel.all_gather(self.model.logits(hidden) * self.spec.logit_scale, "vocab", -1)
        allowed = self.parallel.all_gather(limits.allowed, "vocab", 0)
        base = jnp.where(allowed & self._corrected(base), base, -jnp.inf)
        weights: list[Array] = []

        def choose(scores: Array, place: int) -> Array:
            if not self.random:
                return jnp.argmax(scores, axis=-1).astype(jnp.int32)
            q = distribution(scores, sampling.temperature)
            weights.append(q)
            return draws.draft(place, q)

        drafted = self.draft.chain(base, hidden, rows.token, choose, scale=self.spec.logit_scale)
        sound = jnp.all((drafted.logits < jnp.inf), axis=-1) & jnp.any(drafted.logits > -jnp.inf, axis=-1)
        q = jnp.where(sound[..., None], jnp.stack(weights, axis=1), 0) if self.random else None
        return Proposal(jnp.where(sound, drafted.tokens, -1), q, drafted)

    def _corrected(self, base: Float[Array, "rows drafts vocab"]) -> Bool[Array, "..."]:
        """The ids that may be drafted, where the checkpoint corrects only the best ones."""
        if not 0 < self.spec.top_k < base.shape[-1]:
            return jnp.ones((), bool)
        _, best = jax.lax.top_k(base, self.spec.top_k)
        row, place, _ = jnp.ogrid[: base.shape[0], : base.shape[1], :1]
        return jnp.zeros(base.shape, bool).at[row, place, best].set(True)

    def judge(
        self,
        logits: Float[Array, "rows drafts_and_one local_vocab"],
        proposal: Proposal,
        lengths: Int[Array, " rows"],
        sampling: Sampling,
        limits: Limits,
        draws: Draws,
    ) -> Verdict:
        """Which drafts stay and what follows them."""
        if not self.random:
            return self._judge_greedy(logits, proposal, lengths, sampling, limits)
        count, width = logits.shape[:2]
        whole = self.parallel.all_gather(logits, "vocab", -1)
        allowed = self.parallel.all_gather(limits.allowed, "vocab", 0)
        finite = jnp.all(jnp.isfinite(whole), axis=-1)
        opened = jnp.where(allowed, jnp.where(finite[..., None], whole, 0), -jnp.inf)
        p = distribution(opened, sampling.temperature[:, None], self._keep(opened, sampling))
        assert proposal.q is not None
        verdict = accept.accept(self.rule, p, proposal.q, proposal.tokens, lengths, draws.uniforms(self.spec.drafts))
        after = draws.final(verdict.weights)
        tokens = jnp.concatenate([proposal.tokens, jnp.zeros((count, 1), jnp.int32)], axis=1)
        tokens = jnp.where(jnp.arange(width) == verdict.kept[:, None], after[:, None], tokens)
        logprobs = jax.nn.log_softmax(opened, axis=-1)
        picked = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
        return Verdict(tokens, verdict.kept, picked, finite)

    def _judge_greedy(
        self, logits: Array, proposal: Proposal, lengths: Array, sampling: Sampling, limits: Limits
    ) -> Verdict:
        count, width = logits.shape[:2]
        flat = logits.reshape(count * width, -1)
        each = Sampling(*(jnp.repeat(values, width, axis=0) for values in sampling))
        nowhere = jnp.zeros(count * width, jnp.int32)  # noise has a position, the likeliest id has none
        choice: Choice = sample(flat, limits.allowed, each, nowhere, self.parallel, random=False, impl=self.impl)
        best, logprobs, finite = (values.reshape(count, width) for values in choice)
        return Verdict(best, accept.greedy(best, proposal.tokens, lengths), logprobs, finite)

    def _keep(self, opened: Float[Array, "rows width vocab"], sampling: Sampling) -> Bool[Array, "rows width vocab"]:
        """What top-k and top-p leave of every target row, after its temperature."""
        count, width, vocab = opened.shape
        warm = sampling.temperature >= GREEDY_BELOW
        scaled = opened / jnp.where(warm, sampling.temperature, 1.0)[:, None, None]
        top_k, top_p = (jnp.repeat(values, width) for values in (sampling.top_k, sampling.top_p))
        kept = threshold.keep(scaled.reshape(-1, vocab), top_k, top_p, Parallel.single())
        return kept.reshape(count, width, vocab)


def distribution(
    scores: Float[Array, "*rows vocab"], temperature: Float[Array, "*#rows"], keep: Array | None = None
) -> Float[Array, "*rows vocab"]:
    """Probabilities at each row's temperature, of the kept ids alone; all on the likeliest id where there is no temperature."""
    warm = (temperature >= GREEDY_BELOW)[..., None]
    scaled = scores / jnp.where(warm, temperature[..., None], 1.0)
    scaled = scaled if keep is None else jnp.where(keep, scaled, -jnp.inf)
    certain = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=scores.dtype)
    return jnp.where(warm, jax.nn.softmax(scaled, axis=-1), certain)


def book_block(
    rows: Rows, verdict: Verdict, stops: Int[Array, "rows slots"], capacity: int
) -> tuple[Rows, Bool[Array, "rows drafts_and_one"], Int[Array, " rows"]]:
    """Books the ids of a block one at a time, as ``loop.book`` does with single ones: stop ids, the budget, the end of the cache.

    Returns:
      The rows; which ids are emitted: nothing behind the one that ends a row; and how many tokens of the verified ones are now in
      the sequence, the anchor counted.
    """
    place = jnp.arange(verdict.tokens.shape[1])
    active = rows.status == RUNNING
    stopped = jnp.any(verdict.tokens[..., None] == stops[:, None, :], axis=-1)
    full = (rows.budget[:, None] - (place + 1) <= 0) | (rows.position[:, None] + place + 1 >= capacity)
    status = jnp.where(stopped, STOPPED, jnp.where(full, LENGTH, RUNNING))
    status = jnp.where(verdict.finite, status, BROKEN)
    offered = active[:, None] & (place <= verdict.kept[:, None])
    ends = offered & (status != RUNNING)
    booked = offered & (jnp.cumsum(ends, axis=1) - ends == 0)
    emitted = booked & verdict.finite
    counts, news = (jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in (booked, emitted))
    at = lambda values, index: jnp.take_along_axis(values, jnp.maximum(index, 0)[:, None], axis=1)[:, 0]  # noqa: E731
    token = jnp.where(news > 0, at(verdict.tokens, news - 1), rows.token)
    status = jnp.where(active, at(status, counts - 1), rows.status).astype(jnp.int32)
    return Rows(token, rows.position + counts, rows.budget - counts, status), emitted, counts


def commit(held: HeldCache, counts: Int[Array, " rows"], impl: str = "reference") -> Cache:
    """The cache once the first ``counts`` tokens of a verified block are in: folded states; latent rows count by position alone."""
    return tuple(
        KdaCache(*rollback.commit(entry, counts, impl)) if isinstance(entry, rollback.Pending) else entry
        for entry in held
    )


def _count(tally: Tally, kept: Array, emitted: Array, verified: Array) -> Tally:
    """Drafts that were emitted count as accepted; a row that does not run counts nothing."""
    news = jnp.sum(emitted, axis=1)
    stayed = jnp.minimum(kept, news)
    mark = (jnp.arange(emitted.shape[1]) == stayed[:, None]) & (news > 0)[:, None]
    return Tally(tally.stayed + mark.astype(jnp.int32), tally.verified + cast(Any, verified))
