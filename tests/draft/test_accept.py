"""The three acceptance rules against given distributions and uniforms, and the law of what they give."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.draft import accept
from tests.draft.golden import case, cases

ACCEPT = {rule: jax.jit(partial(accept.accept, rule)) for rule in ("token", "block")}
WIDTH = 7
"""Drafts of every row here: shorter cases are padded, as a batch is."""


@cache
def batch():
    """All unit cases as rows of one batch; what lies beyond a case is garbage on purpose."""
    rows = [case("accept", name) for name in cases("accept")]
    random = np.random.default_rng(0)
    vocab = rows[0]["p"].shape[1]
    p = random.dirichlet(np.ones(vocab), (len(rows), WIDTH + 1)).astype(np.float32)
    q = random.dirichlet(np.ones(vocab), (len(rows), WIDTH)).astype(np.float32)
    drafts = np.zeros((len(rows), WIDTH), np.int32)
    u, lengths = np.zeros((len(rows), WIDTH), np.float32), np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        lengths[i] = len(row["drafts"])
        p[i, : len(row["p"])], q[i, : len(row["q"])] = row["p"], row["q"]
        drafts[i, : lengths[i]], u[i, : lengths[i]] = row["drafts"], row["u"]
    return rows, (p, q, drafts, lengths, u)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_golden(rule):
    # red when a failure stops the block rule, P is not clipped or left out of the residual, truncation or a placeholder is missed
    rows, arguments = batch()
    verdict = ACCEPT[rule](*arguments)
    after = accept.inverse_cdf(verdict.weights, jnp.array([row["u_final"] for row in rows]))
    assert verdict.kept.tolist() == [int(row[f"{rule}_accepted"]) for row in rows]
    assert after.tolist() == [int(row[f"{rule}_next"]) for row in rows]


def test_the_chain_of_the_block_rule():
    # red when h of an inner position forgets the residual mass, or the last verified one gets it
    rows, (p, q, drafts, lengths, _) = batch()
    chain = jax.jit(accept.block_chain)(p, q, drafts, lengths)
    for i, row in enumerate(rows):
        length = len(row["block_p"])
        np.testing.assert_allclose(chain.ratio[i, :length], row["block_p"], atol=2e-6)
        np.testing.assert_allclose(chain.accept[i, :length], row["block_h"], atol=2e-6)


def test_greedy_stops_at_the_first_difference_and_at_placeholders():
    # red when a later agreement counts, or a placeholder or an unverified draft does
    drafts = jnp.array([[1, 2, 3], [1, 9, 3], [1, -1, 3], [1, 2, 3], [4, 2, 3]])
    best = jnp.broadcast_to(jnp.array([1, 2, 3, 4]), (5, 4)).at[2, 1].set(-1)
    assert accept.greedy(best, drafts, jnp.array([3, 3, 3, 2, 3])).tolist() == [3, 1, 1, 2, 0]


def law(rule, p, q, length):
    """The exact law of the first two output tokens: drafts enumerated, uniforms by the intervals where the count changes."""
    vocab = p.shape[-1]
    pairs = np.stack(np.meshgrid(np.arange(vocab), np.arange(vocab), indexing="ij"), -1).reshape(-1, 2).astype(np.int32)
    weight = q[0, pairs[:, 0]] * q[1, pairs[:, 1]]
    grid = (np.arange(64) + 0.5) / 64
    us = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2).astype(np.float32)
    many = len(pairs) * len(us)
    drafts, u = np.repeat(pairs, len(us), 0), np.tile(us, (len(pairs), 1))
    wide = lambda x: np.broadcast_to(x, (many, *x.shape))  # noqa: E731
    verdict = ACCEPT[rule](wide(p), wide(q), drafts, np.full(many, length, np.int32), u)
    count, weights = np.asarray(verdict.kept), np.float64(verdict.weights)
    weights /= weights.sum(1, keepdims=True)
    mass = np.repeat(weight / len(us), len(us))
    joint = np.zeros((vocab, vocab))
    for k in range(length + 1):
        mine = count == k
        first = np.eye(vocab)[drafts[mine, 0]] if k else weights[mine]
        second = {0: np.broadcast_to(p[1], weights[mine].shape), 1: weights[mine]}.get(
            k, np.eye(vocab)[drafts[mine, 1]]
        )
        joint += np.einsum("n,na,nb->ab", mass[mine], first, second)
    return joint


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("length", [1, 2])
def test_the_output_has_the_law_of_the_target(rule, length):
    # red with the residual of p alone, without P in it, or with h = P inside: off by 0.01 and more (the grid costs 0.004)
    random = np.random.default_rng(5)
    # rows do not depend on the tokens before them: the target is then p[0] x p[1]
    p, q = (random.dirichlet(np.full(4, 0.7), n).astype(np.float32) for n in (3, 2))
    np.testing.assert_allclose(law(rule, p, q, length), np.outer(p[0], p[1]), atol=0.004)


@given(st.integers(0, 2**32 - 1))
def test_a_draft_that_is_the_target_always_stays(seed):
    # red when equality is decided with a margin (PF-61)
    random = np.random.default_rng(seed)
    p = random.dirichlet(np.ones(6), (2, 4)).astype(np.float32)
    drafts = random.integers(0, 6, (2, 3)).astype(np.int32)
    u = random.uniform(size=(2, 3)).astype(np.float32) * np.float32(1 - 2**-20)
    for rule in ("token", "block"):
        verdict = ACCEPT[rule](p, p[:, :-1], drafts, np.full(2, 3, np.int32), u)
        assert verdict.kept.tolist() == [3, 3]
        np.testing.assert_array_equal(verdict.weights, p[:, -1])


def test_acceptance_of_a_known_pair():
    # red when acceptance is not min(1, p / q) (PF-43)
    p, q = np.float32([0.5, 0.3, 0.2]), np.float32([0.2, 0.5, 0.3])
    assert np.minimum(p, q).sum() == pytest.approx(0.70)
    u = ((np.arange(1000) + 0.5) / 1000).astype(np.float32)
    kept = 0.0
    for token in range(3):
        rows = np.broadcast_to(p, (1000, 2, 3)), np.broadcast_to(q, (1000, 1, 3))
        drafts, ones = np.full((1000, 1), token, np.int32), np.ones(1000, np.int32)
        kept += q[token] * float(np.mean(ACCEPT["token"](*rows, drafts, ones, u[:, None]).kept))
    assert kept == pytest.approx(0.70, abs=0.002)
