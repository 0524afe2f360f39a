"""Taps of the target, verification of a block, and the target's state after part of it, against the golden data."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kimi_jax.cache import KdaCache
from kimi_jax.draft.speculate import Seeded, book_block, commit
from kimi_jax.layers.taps import Taps
from tests.draft.golden import case
from tests.draft.models import WIDTH, arguments, drafted, rows_at
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

CASES = range(4)
HIDDEN, STATE = 1e-4, 2e-5


@cache
def passes(name: str):
    """All golden prompts as one batch: the tapped prompt, a draft, its verification, and the draft after the commit."""
    steps, params = drafted(name)
    wanted = [case(name, f"case{i}") for i in CASES]
    lengths = np.array([len(w["ids"]) for w in wanted], np.int32)
    ids = np.zeros((len(wanted), WIDTH), np.int32)
    for row, w in enumerate(wanted):
        ids[row, : lengths[row]] = w["ids"]
    sampling, limits = arguments(steps, len(wanted))
    specs, whole = steps._specs, PartitionSpec()

    # the prompt's running sums are compared, and the draft is given the golden mixtures: one pass for both streams
    given = np.stack([np.pad(w["taps_attn_res"], ((0, WIDTH - len(w["ids"])), (0, 0), (0, 0))) for w in wanted])
    sums = Taps(steps.drafter.taps, "prefix")

    def prompt(params, cache, ids, lengths, given):
        model, draft = steps.bound(params)
        _, taps, target = model.tapped(ids, 0 * lengths, lengths, cache.target, sums)
        written = draft.write(draft.fuse(given), 0 * lengths, lengths, cache.context)
        return cache._replace(target=target, context=written), taps

    def around(params, cache, rows, sampling, limits):
        speculation = steps.speculation(params, random=False)
        model, draft = speculation.model, speculation.draft
        draws = Seeded(sampling.seed, rows.position)

        def propose(rows, context):
            mask = jnp.full((len(wanted), steps.drafter.drafts - 1), steps.drafter.mask_id)
            embedded = model.model.embed_tokens(jnp.concatenate([rows.token[:, None], mask], axis=1))
            hidden = draft.block(embedded, rows.position, context)
            return hidden, speculation.propose(rows, context, sampling, limits, draws)

        hidden, proposal = propose(rows, cache.context)
        base = steps.parallel.all_gather(model.logits(hidden), "vocab", -1)
        fed = jnp.concatenate([rows.token[:, None], proposal.tokens], axis=1)
        new = jnp.full_like(rows.token, fed.shape[1])
        out, taps, held = model.tapped(fed, rows.position, new, cache.target, steps.taps, held=True)
        local = model.logits(out)
        scores = steps.parallel.all_gather(local, "vocab", -1)
        verdict = speculation.judge(local, proposal, speculation.lengths(rows), sampling, limits, draws)
        after, emitted, counts = book_block(rows, verdict, limits.stops, steps.capacity)
        context = draft.write(draft.fuse(taps), rows.position, counts, cache.context)
        committed = cache._replace(target=commit(held, counts), context=context)
        seen = (hidden, base, proposal.drafted, scores, taps, verdict, emitted, counts, propose(after, context))
        return committed, seen

    def run(body, inputs):
        mapped = jax.shard_map(
            body, mesh=steps.mesh, in_specs=inputs, out_specs=(specs["cache"], whole), check_vma=False
        )
        return jax.jit(mapped)

    first = run(prompt, (specs["params"], specs["cache"], whole, whole, whole))
    cache_, taps = first(params, steps.new_cache(len(wanted)), ids, lengths, given)
    rows = rows_at([int(w["anchor"]) for w in wanted], lengths)
    second = run(around, tuple(specs[name] for name in ("params", "cache", "rows", "sampling", "limits")))
    committed, seen = second(params, cache_, rows, sampling, limits)
    return wanted, jax.device_get((taps, committed, seen)), lengths


def close(got, wanted, tolerance):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_golden():
    # red with the other stream, a tap one layer off, another order, or a bank of blocks that reading changes; when the verification
    # scores other ids than the drafted ones, or the step keeps another number of them
    wanted, (taps, _, seen), lengths = passes("gqa")
    _, _, drafts, scores, verify_taps, verdict, emitted, counts, (again, _) = seen
    for row, (w, n) in enumerate(zip(wanted, lengths, strict=True)):
        close(taps[row, :n], w["taps_prefix"], HIDDEN)
        close(verify_taps[row], w["verify_taps_attn_res"], HIDDEN)
        close(scores[row], w["target_logits"], HIDDEN)
        assert drafts.tokens[row].tolist() == w["tokens"].tolist()
        assert int(verdict.kept[row]) == int(w["accepted"])
        assert verdict.tokens[row][emitted[row]].tolist() == w["committed"].tolist()
        assert int(counts[row]) == len(w["committed"])
        close(again[row], w["next_hidden"], HIDDEN)


@pytest.mark.slow
def test_target_state_after_rollback():
    # red when a or a + 2 rows are committed, the state of another row stays, or a convolution window is stale
    wanted, (_, committed, _), lengths = passes("gqa")
    for row in range(3):
        recurrent = [entry for entry in committed.target if isinstance(entry, KdaCache)]
        latent = [entry.latent for entry in committed.target if not isinstance(entry, KdaCache)]
        close(np.stack([entry.state[row] for entry in recurrent]), wanted[row]["after_kda_state"], STATE)
        close(np.stack([entry.conv[row] for entry in recurrent]), wanted[row]["after_kda_conv"], STATE)
        n, rows = lengths[row], wanted[row]["after_mla_rows"]
        close(np.stack([held[row, n : n + rows.shape[1]] for held in latent]), rows, STATE)
