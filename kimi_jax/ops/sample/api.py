"""The next token of every row: greedy, or temperature with top-k and top-p, without gathering the vocabulary.

Each device draws for its own slice; one gather of a few numbers per row picks the winner. Noise is a function of the request's
seed, the position and the token id alone, so a draw does not depend on batch, layout or device count.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.sample import extras as shaping
from kimi_jax.ops.sample import noise, pallas, threshold
from kimi_jax.ops.sample.extras import Extras, Seen
from kimi_jax.placement.collectives import Parallel

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy; nothing is ever divided by them."""


class Sampling(NamedTuple):
    """How each row draws; arrays of one entry per row.

    Attributes:
      temperature: float32; below ``GREEDY_BELOW`` the row is greedy.
      top_p: float32 in (0, 1]; 1 keeps everything.
      top_k: int32; 0 keeps everything. Ids that tie with the last kept one are kept too.
      seed: uint32.
    """

    temperature: Float[Array, " rows"]
    top_p: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    seed: UInt32[Array, " rows"]


class Choice(NamedTuple):
    """The drawn ids, their log-probabilities (temperature 1, nothing cut), and whether all logits of the row were finite."""

    ids: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    finite: Bool[Array, " rows"]


class Alternatives(NamedTuple):
    """The likeliest ids of each row, best first, with their log-probabilities; -1 and -inf where fewer may be drawn."""

    ids: Int[Array, "*rows top"]
    logprobs: Float[Array, "*rows top"]


def sample(
    logits: Float[Array, "rows local_vocab"],
    allowed: Bool[Array, " local_vocab"],
    sampling: Sampling,
    positions: Int[Array, " rows"],
    parallel: Parallel,
    *,
    random: bool,
    impl: str = "reference",
) -> Choice:
    """Draws one id per row.

    Args:
      logits: this device's slice of the scores, float32.
      allowed: ids that may be drawn (padding and unnamed reserved ids may not).
      sampling: per-row parameters.
      positions: position that the drawn token will take; part of the noise key.
      random: whether any row may have a temperature; False compiles the greedy program only.
      impl: which implementation runs the greedy program; draws with a temperature are XLA's in all of them.
    """
    drawn = partial(_drawn, logits, allowed, sampling, positions, parallel, random)
    greedy = drawn if random else None
    built = {
        "reference": drawn,
        "pallas": greedy or partial(_greedy, logits, allowed, parallel, interpret=False),
        "interpret": greedy or partial(_greedy, logits, allowed, parallel, interpret=True),
    }
    return choose("sample", impl, built)()


def sample_full(
    logits: Float[Array, "rows local_vocab"],
    allowed: Bool[Array, " local_vocab"],
    sampling: Sampling,
    extras: Extras,
    seen: Seen,
    positions: Int[Array, " rows"],
    parallel: Parallel,
    *,
    top: int,
) -> tuple[Choice, Alternatives]:
    """Draws as :func:`sample` does, with everything that a request may ask; with neutral extras its ids are those of ``sample``.

    Bias, penalties and the mask act first, then the temperature, min-p, top-k and top-p: vLLM's order. Log-probabilities are of
    the logits as they came.

    Args:
      extras: per-row parameters.
      seen: what penalties count from; see ``extras.book``.
      top: alternatives to report.

    Returns:
      The choice, which is not finite for a row whose mask leaves nothing to draw; and the alternatives.
    """
    width = logits.shape[-1]
    offset = parallel.index("vocab") * width
    open_logits = jnp.where(allowed, logits, -jnp.inf)
    shaped = shaping.penalised(shaping.biased(open_logits, extras, offset), extras, seen)
    shaped = jnp.where(shaping.unmasked(extras.mask, offset, width), shaped, -jnp.inf)
    keyed = _keyed(shaped, sampling, positions, offset, parallel, extras.min_p)
    merged = _choose(logits, open_logits, keyed, offset, parallel)
    choice = merged.choice._replace(finite=merged.choice.finite & jnp.any(merged.scores > -jnp.inf, axis=0))
    return choice, _alternatives(open_logits, merged, offset, top, parallel)


def _greedy(
    logits: Float[Array, "rows local_vocab"],
    allowed: Bool[Array, " local_vocab"],
    parallel: Parallel,
    *,
    interpret: bool,
) -> Choice:
    offer = pallas.look(logits, allowed, interpret=interpret)
    offers = parallel.all_gather(offer[None], "vocab", 0)
    ids, logprobs, finite = pallas.merge(offers, width=logits.shape[-1], interpret=interpret)
    return Choice(ids, logprobs, finite > 0)


def _drawn(
    logits: Float[Array, "rows local_vocab"],
    allowed: Bool[Array, " local_vocab"],
    sampling: Sampling,
    positions: Int[Array, " rows"],
    parallel: Parallel,
    random: bool,
) -> Choice:
    offset = parallel.index("vocab") * logits.shape[-1]
    open_logits = jnp.where(allowed, logits, -jnp.inf)
    keyed = _keyed(open_logits, sampling, positions, offset, parallel) if random else open_logits
    return _choose(logits, open_logits, keyed, offset, parallel).choice


def _keyed(
    open_logits: Float[Array, "rows local_vocab"],
    sampling: Sampling,
    positions: Int[Array, " rows"],
    offset: Int[Array, ""] | int,
    parallel: Parallel,
    min_p: Float[Array, " rows"] | None = None,
) -> Float[Array, "rows local_vocab"]:
    """Scores whose largest is the draw."""
    warm = sampling.temperature >= GREEDY_BELOW
    scaled = open_logits / jnp.where(warm, sampling.temperature, 1.0)[:, None]
    likely = scaled if min_p is None else threshold.likely(scaled, min_p, parallel)
    kept = threshold.keep(likely, sampling.top_k, sampling.top_p, parallel)
    gumbel = noise.gumbel(sampling.seed, positions, offset, open_logits.shape[-1])
    return jnp.where(warm[:, None], jnp.where(kept, scaled + gumbel, -jnp.inf), open_logits)


class _Merged(NamedTuple):
    """The choice over all shares, the score of each share's best, and what a logit's log-probability takes off it in two steps."""

    choice: Choice
    scores: Float[Array, "shards rows"]
    peak: Float[Array, " rows"]
    log_sum: Float[Array, " rows"]


def _choose(
    logits: Float[Array, "rows local_vocab"],
    open_logits: Float[Array, "rows local_vocab"],
    keyed: Float[Array, "rows local_vocab"],
    offset: Int[Array, ""] | int,
    parallel: Parallel,
) -> _Merged:
    """The best of ``keyed`` over all shares, reported as ``open_logits`` see it."""
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    best = jnp.argmax(keyed, axis=-1)
    pick = lambda values: jnp.take_along_axis(values, best[:, None], axis=-1)[:, 0]  # noqa: E731
    top = jnp.max(open_logits, axis=-1)
    total = jnp.sum(jnp.exp(open_logits - jnp.where(jnp.isfinite(top), top, 0.0)[:, None]), axis=-1)
    # travels as integers: a small id seen as a float would be a denormal, which some devices flush to 0
    scores = [_bits(score) for score in (pick(keyed), pick(logits), top, total)]
    local = jnp.stack([best.astype(jnp.int32) + offset, finite.astype(jnp.int32), *scores], axis=-1)
    return _merge(parallel.all_gather(local[None], "vocab", 0))


def _bits(score: Float[Array, " rows"]) -> Int[Array, " rows"]:
    return jax.lax.bitcast_convert_type(score, jnp.int32)


def _merge(shards: Int[Array, "shards rows 6"]) -> _Merged:
    """Winner over the shards; the first shard wins a tie, so the lower id does."""
    ids, finite, *scores = jnp.moveaxis(shards, -1, 0)
    keyed, logit, top, total = (jax.lax.bitcast_convert_type(score, jnp.float32) for score in scores)
    winner = jnp.argmax(keyed, axis=0)
    pick = lambda values: jnp.take_along_axis(values, winner[None], axis=0)[0]  # noqa: E731
    peak = jnp.max(top, axis=0)
    safe = jnp.where(jnp.isfinite(peak), peak, 0.0)
    log_total = jnp.log(jnp.sum(total * jnp.exp(jnp.where(jnp.isfinite(top), top, -jnp.inf) - safe), axis=0))
    choice = Choice(pick(ids), pick(logit) - safe - log_total, jnp.all(finite > 0, axis=0))
    return _Merged(choice, keyed, safe, log_total)


def _alternatives(
    open_logits: Float[Array, "rows local_vocab"],
    merged: _Merged,
    offset: Int[Array, ""] | int,
    top: int,
    parallel: Parallel,
) -> Alternatives:
    """The best ``top`` of every share, and of those the best: a tie goes to the lower id."""
    scores, ids = jax.lax.top_k(open_logits, min(top, open_logits.shape[-1]))
    offers = jnp.stack([_bits(scores), ids.astype(jnp.int32) + offset])
    scores, ids = parallel.all_gather(offers, "vocab", 2)
    scores, place = jax.lax.top_k(jax.lax.bitcast_convert_type(scores, jnp.float32), top)
    ids = jnp.where(scores > -jnp.inf, jnp.take_along_axis(ids, place, axis=1), -1)
    return Alternatives(ids, scores - merged.peak[:, None] - merged.log_sum[:, None])
