"""Speculative decoding on the device: plain decoding's ids without a temperature, the target's law with one."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.draft import accept
from kimi_jax.draft.speculate import Seeded, Speculation, Verdict, book_block
from kimi_jax.engine.request import Request
from kimi_jax.loop import RUNNING, STOPPED, Rows, book
from kimi_jax.ops.sample.api import Choice
from tests.draft import quick_draft
from tests.draft.golden import case, golden
from tests.draft.models import arguments, drafted, prefilled, rows_at, runner
from tests.parity.light import light_compilation as light_compilation
from tests.parity.quick import CAPACITY, answers

pytestmark = pytest.mark.usefixtures("light_compilation")


def prompts(name="gqa"):
    return [case(name, f"case{i}")["ids"].tolist() for i in range(4)]


def expected(row: int, max_tokens: int, stops: tuple[int, ...]) -> tuple[list[int], str]:
    ids = quick_draft.plain()[row]
    stop = next((i for i, token in enumerate(ids[:max_tokens]) if token in stops), None)
    if stop is not None:
        return ids[: stop + 1], "stop"
    return ids[:max_tokens], "length"


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greedy_is_plain_greedy(data):
    # red when a row commits one token too many, a stop id, the budget or the end of the cache inside a block is overlooked, a state
    # of an earlier batch stays, or rows of different acceptance disturb one another (PF-40, PF-42, PF-62)
    some = st.sampled_from([1, 2, 3, 5, 8, 9, 17, CAPACITY])
    budgets = [data.draw(some) for _ in range(4)]
    drawn = [st.lists(st.sampled_from(ids[:24]), max_size=1) for ids in quick_draft.plain()]
    stops = [tuple(data.draw(ids)) for ids in drawn]
    requests = [
        Request(ids, max_tokens=budget, stops=stop)
        for ids, budget, stop in zip(quick_draft.PROMPTS, budgets, stops, strict=True)
    ]
    wanted = [expected(row, budgets[row], stops[row]) for row in range(4)]
    assert answers(quick_draft.runner(), requests) == wanted


def test_batches_hold_every_acceptance():
    # red when the test above has nothing to accept, or nothing to reject
    batch = quick_draft.runner().open([Request(ids, max_tokens=CAPACITY) for ids in quick_draft.PROMPTS])
    list(batch.news())
    while batch.open_rows:
        batch.decode()
        list(batch.news())
    stayed = np.asarray(batch._cache.tally.stayed).sum(0)
    batch.close()
    assert stayed[0] > 0
    assert stayed[4] > 0
    assert stayed[1:4].sum() > 0


@pytest.mark.slow
def test_the_loop_of_the_golden_data():
    # red when a step drafts from another context than the committed tokens', or an accepted draft is lost
    wanted = case("gqa", "loop_greedy")
    made = runner("gqa")
    batch = made.open([Request(ids, max_tokens=100) for ids in prompts()])
    try:
        output, stayed = [int(golden()["gqa/case0/anchor"])], []
        for _ in range(5):
            batch.decode(steps=1)
            ids = np.asarray(batch._drawn.ids)[0]
            output += ids[ids >= 0].tolist()
            stayed.append(int((ids >= 0).sum()) - 1)
        tally = batch._cache.tally
        counted = np.asarray(tally.stayed)[0]
    finally:
        batch.close()
    assert output == wanted["output"].tolist()
    assert stayed == wanted["accepted"].tolist()
    assert counted.tolist() == np.bincount(stayed, minlength=8).tolist()
    assert int(tally.verified[0]) == 35


class Given:
    """Draws by inverse CDF from given uniforms."""

    def __init__(self, draft, uniforms, final):
        self._draft, self._uniforms, self._final = draft, uniforms, final

    def draft(self, place, q):
        return accept.inverse_cdf(q, self._draft[:, place])

    def uniforms(self, drafts):
        return self._uniforms

    def final(self, weights):
        return accept.inverse_cdf(weights, self._final)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa"])
def test_block_rule_over_several_steps(name):
    # red when q is taken before the bias, u or a residual belongs to another row, or a rejected draft leaves a trace
    wanted, steps = case(name, "loop_block"), drafted(name)[0]
    params = drafted(name)[1]
    cache_, lengths = prefilled(steps, params, [case(name, "case1")["ids"].tolist()])
    sampling, limits = arguments(steps, 1, temperature=1.0)

    def body(params, cache, rows, draft, uniforms, final):
        speculation = steps.speculation(params, random=True)
        return speculation.step(cache, rows, sampling, limits, Given(draft, uniforms, final))

    run = jax.jit(body)
    rows = rows_at([int(case(name, "case1")["anchor"])], lengths)
    output, stayed = rows.token.tolist(), []
    for step in range(len(wanted["accepted"])):
        given_ = (wanted[name][step : step + 1] for name in ("u_draft", "u_accept", "u_final"))
        cache_, rows, drawn = run(params, cache_, rows, *given_)
        ids = np.asarray(drawn.ids)[0]
        output += ids[ids >= 0].tolist()
        stayed.append(int((ids >= 0).sum()) - 1)
    assert stayed == wanted["accepted"].tolist()
    assert output == wanted["output"].tolist()


@given(st.data())
def test_a_block_is_booked_like_single_ids(data):
    # red when the order is not stop, budget, end of the cache; something behind the end is emitted; or a broken row is believed
    width, tokens = 5, st.integers(0, 6)
    status = data.draw(st.sampled_from([RUNNING, RUNNING, RUNNING, STOPPED]))
    start = Rows(
        *(np.array([v], np.int32) for v in (9, data.draw(st.integers(90, 99)), data.draw(st.integers(1, 7)), status))
    )
    ids = np.array([data.draw(st.lists(tokens, min_size=width, max_size=width))], np.int32)
    finite = np.array([[data.draw(st.sampled_from([True, True, True, False])) for _ in range(width)]])
    kept, stops = np.array([data.draw(st.integers(0, width - 1))], np.int32), np.array([[5, -1]], np.int32)
    after, emitted, counts = BOOK(start, Verdict(ids, kept, np.zeros((1, width), np.float32), finite), stops, 100)
    rows, news, fed = start, [], 0
    for place in range(int(kept[0]) + 1):
        fed += int(rows.status[0] == RUNNING)
        rows, one = book(rows, Choice(ids[:, place], None, finite[:, place]), 1, stops, 100)
        news.append(bool(one[0]))
    assert [bool(e) for e in emitted[0]] == news + [False] * (width - len(news))
    assert [int(x[0]) for x in after] == [int(x[0]) for x in rows]
    assert int(counts[0]) == fed


BOOK = jax.jit(book_block, static_argnums=3)

ROWS, VOCAB, DRAFTS, LONG = 1 << 15, 3, 2, 4


@partial(jax.jit, static_argnames="rule")
def simulated(p, q, rule):
    """Many rows of a first-order model, each with its own seed, until every one of them has emitted ``LONG`` tokens."""

    def step(carry, _):
        token, position, out = carry
        draws = Seeded(jnp.arange(ROWS, dtype=jnp.uint32), position)
        last, ids, weights = token, [], []
        for place in range(DRAFTS):
            weights.append(q[last])
            last = draws.draft(place, q[last])
            ids.append(last)
        drafts, fed = jnp.stack(ids, 1), jnp.stack([token, *ids], 1)
        full = jnp.full(ROWS, DRAFTS)
        verdict = accept.accept(rule, p[fed], jnp.stack(weights, 1), drafts, full, draws.uniforms(DRAFTS))
        after = draws.final(verdict.weights)
        for place in range(DRAFTS + 1):
            new = jnp.where(place == verdict.kept, after, drafts[:, min(place, DRAFTS - 1)])
            at = jnp.where(place <= verdict.kept, position + place, 2 * LONG + DRAFTS)
            out = out.at[jnp.arange(ROWS), at].set(new, mode="drop")
        return (after, position + verdict.kept + 1, out), None

    start = (jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32), jnp.zeros((ROWS, 2 * LONG + DRAFTS), jnp.int32))
    (_, _, out), _ = jax.lax.scan(step, start, None, length=LONG)
    return out[:, :LONG]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_seeded_choices_have_the_law_of_the_target(rule):
    # red when every step uses the same numbers, or the draft's again for the token after it: chi-square of 80 cells far above 140
    random = np.random.default_rng(3)
    p, q = (random.dirichlet(np.full(VOCAB, 0.8), VOCAB).astype(np.float32) for _ in range(2))
    out = np.asarray(simulated(p, q, rule))
    seen = np.bincount(out @ VOCAB ** np.arange(LONG), minlength=VOCAB**LONG)
    chains = np.stack(np.unravel_index(np.arange(VOCAB**LONG), (VOCAB,) * LONG), 1)[:, ::-1]
    before = np.concatenate([np.zeros((len(chains), 1), int), chains[:, :-1]], axis=1)
    law = np.float64(p)[before, chains].prod(1)
    large = law * ROWS > 5
    assert np.sum((seen - law * ROWS)[large] ** 2 / (law * ROWS)[large]) < 140


@pytest.mark.slow
def test_devices_change_nothing():
    # red when devices draw differently, a part of the draft is summed twice or not at all, or draws depend on the batch
    requests = [
        Request(ids, max_tokens=12, seed=7, temperature=t)
        for ids, t in zip(quick_draft.PROMPTS, (0.0, 0.8) * 2, strict=True)
    ]
    alone = [answers(quick_draft.runner(), [request] * 4)[0] for request in requests]
    assert alone[0][0] == quick_draft.plain()[0][:12]
    assert answers(quick_draft.runner(), requests) == alone
    assert answers(quick_draft.runner(2), requests) == alone


def test_only_the_best_scores_are_corrected():
    # red when the best of another place of the block, or too many, may be drafted
    base = jnp.array([[[1.0, 3.0, 2.0], [5.0, 0.0, -1.0]]])
    part = SimpleNamespace(spec=SimpleNamespace(top_k=2))
    assert Speculation._corrected(part, base).tolist() == [[[False, True, True], [True, True, False]]]
