"""Attention of a drafted block against softmax written out, in one piece and in several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.draft import attend


def oracle(query, context, block, lengths, scale, causal):
    rows, drafts, kv_heads, group, _ = query.shape
    out = np.zeros((*query.shape[:-1], context[1].shape[-1]))
    for row, i, head, member in np.ndindex(rows, drafts, kv_heads, group):
        seen = i + 1 if causal else drafts
        n = lengths[row]
        keys = np.concatenate([context[0][row, :n, head], block[0][row, :seen, head]])
        values = np.concatenate([context[1][row, :n, head], block[1][row, :seen, head]])
        scores = keys @ query[row, i, head, member] * scale
        weights = np.exp(scores - scores.max())
        out[row, i, head, member] = weights / weights.sum() @ values
    return out


def paged(context, lengths, page):
    """The same rows in pages of a pool, in no order, and the tables; pages that nobody needs are none."""
    rows, length = context[0].shape[:2]
    order = np.random.default_rng(page).permutation(rows * length // page).reshape(rows, -1)
    needed = np.arange(length // page) < -(-lengths[:, None] // page)
    pools = [np.full((order.size, page, *x.shape[2:]), np.nan) for x in context]
    for pool, x in zip(pools, context, strict=True):
        pool[order[needed]] = x.reshape(rows, length // page, page, *x.shape[2:])[needed]
    return tuple(pools), np.where(needed, order, -1)


@pytest.mark.parametrize(("piece", "page"), [(8, None), (5, None), (64, None), (8, 3), (64, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_over_context_and_block(piece, page, causal, monkeypatch):
    # red when the last piece counts rows twice, a row sees the length or pages of another, unwritten rows are read, or the mask is
    # lost
    monkeypatch.setattr(attend, "BLOCK", piece)
    random = np.random.default_rng(piece)
    draw = lambda *shape: random.normal(size=shape)  # noqa: E731
    rows, drafts, length, kv_heads, group, dim, width = 4, 3, 18, 2, 2, 6, 5
    lengths = np.array([0, 3, 16, 18], np.int32)
    query = draw(rows, drafts, kv_heads, group, dim)
    context = draw(rows, length, kv_heads, dim), draw(rows, length, kv_heads, width)
    block = draw(rows, drafts, kv_heads, dim), draw(rows, drafts, kv_heads, width)
    wanted = oracle(query, context, block, lengths, 0.3, causal)
    unwritten = np.arange(length)[:, None, None] >= lengths[:, None, None, None]
    context = tuple(np.where(unwritten, np.nan, x) for x in context)
    context, tables = paged(context, lengths, page) if page else (context, None)
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (query, context, block))
    run = jax.jit(lambda q, c, b, n, pages: attend.attend(q, c, b, n, scale=0.3, causal=causal, pages=pages))
    np.testing.assert_allclose(run(*given, lengths, tables), wanted, atol=1e-5)
