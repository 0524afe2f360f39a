"""Sequences dealt to several devices: who holds what, and parts joined to what one device computes."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kimi_jax.ops.context import merge
from kimi_jax.ops.context import rows as rows_of_all
from kimi_jax.ops.context.ownership import Dealt, in_order, own_columns, own_rows
from kimi_jax.ops.indexer import api as indexer
from kimi_jax.ops.mla import api as mla
from kimi_jax.placement.collectives import Parallel

WAYS = list(product((2, 4, 8), (1, 2)))
LATENT = 24


@pytest.fixture(scope="module")
def data():
    with np.load(Path(__file__).parents[1] / "fixtures" / "k31-tiny" / "golden.npz") as arrays:
        return {name.removeprefix("dcp/"): arrays[name] for name in arrays.files if name.startswith("dcp/")}


@pytest.fixture(params=WAYS, ids=lambda way: f"n{way[0]}-i{way[1]}")
def golden(request, data):
    """One way of dealing: its arrays, the inputs they have in common, and the rule."""
    parts, run = request.param
    own = {name.split("/")[1]: array for name, array in data.items() if name.startswith(f"n{parts}_i{run}/")}
    return SimpleNamespace(
        **{name: array for name, array in data.items() if "/" not in name}, **own, dealt=Dealt(parts, run)
    )


def test_owners_slots_and_lengths(golden):
    # red when the run is not part of the turn, a table entry covers the local page only, or a length counts the query twice
    dealt, positions = golden.dealt, jnp.arange(96)
    np.testing.assert_array_equal(dealt.owner(positions), golden.owner)
    block = int(golden.block_size)
    column = np.asarray(dealt.column(positions))
    for rank in range(dealt.parts):
        here = golden.owner == rank
        slot = np.where(here, golden.block_table[column // block] * block + column % block, -1)
        np.testing.assert_array_equal(slot, golden.slot[rank])
        np.testing.assert_array_equal(dealt.held(golden.pos + 1, rank), golden.lens[rank])
        np.testing.assert_array_equal(dealt.last(golden.pos, rank), golden.lens[rank] - 1)
        np.testing.assert_array_equal(dealt.position(column[here], rank), positions[here])
        np.testing.assert_array_equal(dealt.held(96, rank), here.sum())


ROOM = 48
"""Columns of a rank in these tests, the same for all ways, and so one program for all of them."""


def of_rank(array, owner, rank, axis=-1):
    """What a rank holds of an array over positions; what it does not hold up to its room is not a number."""
    own = np.take(array, np.flatnonzero(owner == rank), axis=axis)
    pad = [(0, 0)] * array.ndim
    pad[axis] = (0, ROOM - own.shape[axis])
    return np.pad(own, pad, constant_values=np.nan)


@partial(jax.jit, static_argnames="k")
def handed_in(parts, run, rank, scores, positions, k):
    dealt = Dealt(parts, run)
    seen = jnp.arange(ROOM) <= dealt.last(positions, rank)[:, None]
    local = jnp.where(seen, scores, -jnp.inf)
    return merge.candidates(local, indexer.top_k(local, k), dealt, rank)


def candidates(golden, scores, positions):
    """What each rank hands in: scores and positions of its own best, of its own columns only."""
    parts, run, k = golden.dealt.parts, golden.dealt.run, int(golden.k)
    ranks = range(parts)
    found = [handed_in(parts, run, rank, of_rank(scores, golden.owner, rank), positions, k) for rank in ranks]
    return [np.stack(each) for each in zip(*found, strict=True)]


def test_selection(golden):
    # red when a rank numbers its columns from its own first, a rank that sees less hands in position 0, or ties go by rank
    scores, positions = candidates(golden, golden.scores, golden.pos)
    for rank in range(golden.dealt.parts):
        for got, expected in ((positions, golden.cand_pos), (scores, golden.cand_score)):
            np.testing.assert_array_equal(np.sort(got[rank], axis=-1), np.sort(expected[rank], axis=-1))
    joined = [np.concatenate(list(each), axis=-1) for each in (scores, positions)]
    np.testing.assert_array_equal(merge.selection(*joined, int(golden.k)), golden.selected)


def test_ties(golden):
    # red when -0.0 comes before +0.0 or after, or equal scores go to the first rank instead of the smaller position
    found = candidates(golden, golden.tie_scores, golden.tie_pos)
    joined = [np.concatenate(list(each), axis=-1) for each in found]
    np.testing.assert_array_equal(merge.selection(*joined, int(golden.k)), golden.tie_selected)


def test_own_columns(golden):
    # red when a column of another rank, or the filler, is taken for one of this one
    for rank in range(golden.dealt.parts):
        got = np.asarray(own_columns(golden.selected, golden.dealt, rank))
        np.testing.assert_array_equal(got, golden.own[rank])
        np.testing.assert_array_equal((got >= 0).sum(axis=-1), golden.count[rank])


def test_attention_joined(golden):
    # red when logarithms are to base 2, an empty part weighs something, or a row without any part divides by zero
    o, lse = golden.o, golden.lse
    for empty in (-np.inf, np.float32(-1e30)):
        value, log = merge.attention(o, np.where(np.isinf(lse), empty, lse))
        np.testing.assert_allclose(value, golden.merged, rtol=0, atol=1e-5)
        np.testing.assert_allclose(log, golden.lse_merged, rtol=0, atol=1e-5)
        assert not np.asarray(value)[golden.pos < 0].any() and np.isneginf(np.asarray(log)[golden.pos < 0]).all()


def test_dense_attention_of_every_rank(golden):
    # red when a part hides by its own columns a position that the query sees, or the other way round
    whole, log = attend(golden, np.zeros(96, int), 0, golden.pos)
    ranks = range(golden.dealt.parts)
    lasts = [golden.dealt.last(golden.pos, rank) for rank in ranks]
    parts = [attend(golden, golden.owner, rank, last) for rank, last in zip(ranks, lasts, strict=True)]
    value, joined = merge.attention(*(np.stack(each) for each in zip(*parts, strict=True)))
    np.testing.assert_allclose(value, whole, rtol=0, atol=1e-5)
    seen = golden.pos >= 0
    np.testing.assert_allclose(np.asarray(joined)[0, seen], np.asarray(log)[0, seen], rtol=0, atol=1e-5)


@partial(jax.jit, static_argnames="scale")
def partial_attention(queries, rows, positions, lengths, scale):
    return mla.attend_partial(queries, rows, positions, lengths, latent=LATENT, scale=scale)


def attend(golden, owner, rank, positions):
    queries = np.concatenate([golden.q_latent, golden.q_shared], axis=-1)[None]
    rows = np.pad(of_rank(golden.rows, owner, rank, axis=0) if owner.any() else golden.rows, [(0, 0), (0, 0)])
    rows = np.pad(rows, [(0, 96 - len(rows)), (0, 0)], constant_values=np.nan)
    length = np.array([(owner == rank).sum()], np.int32)
    return partial_attention(queries, rows[None], np.asarray(positions, np.int32)[None], length, float(golden.scale))


@partial(jax.jit, static_argnames=("parts", "run"))
def dealt_rows(parts, run, new, starts, counts):
    deal = partial(own_rows, new, starts, counts, Dealt(parts, run))
    return [deal(rank) for rank in range(parts)]


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("parts, run", [(2, 1), (3, 2), (8, 2)])
def test_rows_of_a_call_go_to_their_owners(parts, run, tokens):
    # red when a call that begins in the middle of a run, or that a rank has no part in, is dealt wrongly
    starts, counts = (each.ravel() for each in np.meshgrid(np.arange(20), np.arange(tokens + 1)))
    new = (starts[:, None] + np.arange(tokens))[..., None]
    held = [[] for _ in starts]
    for rank, found in enumerate(dealt_rows(parts, run, new, starts, counts)):
        rows, first, own = map(np.asarray, found)
        assert rows.shape[1] == Dealt(parts, run).most(tokens) and own.max() == rows.shape[1]
        for at, positions in enumerate(held):
            mine = rows[at, : own[at], 0].tolist()
            columns = [p // (parts * run) * run + p % run for p in mine]
            assert all(p // run % parts == rank for p in mine)
            assert columns == list(range(first[at], first[at] + own[at]))
            positions += mine
    for start, count, positions in zip(starts, counts, held, strict=True):
        assert sorted(positions) == list(range(start, start + count))


@pytest.mark.parametrize("parts, run", [(2, 1), (4, 2)])
def test_joined_rows_come_in_the_order_of_positions(parts, run):
    # red when ranks are put one after the other, or runs are torn
    dealt, columns = Dealt(parts, run), 3 * run
    joined = np.stack([dealt.position(np.arange(columns), rank) for rank in range(parts)])[None]
    np.testing.assert_array_equal(in_order(joined, dealt)[0], np.arange(parts * columns))


@pytest.mark.parametrize("page", [None, 4])
def test_rows_of_all_devices_in_blocks(monkeypatch, page):
    # red when a block lands where its columns are counted, a page of another sequence is read, rows come rank by rank,
    # or more blocks are asked for than the longest sequence has
    monkeypatch.setattr(rows_of_all, "BLOCK", 32)  # two pages of a device, of ten columns
    parts, run, columns, width = 4, 2, 20, 3
    dealt = Dealt(parts, run)
    mesh = jax.make_mesh((parts,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    parallel = Parallel((("t", parts),), (("sequence", ("t",)),), run)
    where = np.concatenate([dealt.position(np.arange(columns), rank) for rank in range(parts)])
    held = np.stack([where, where + 1]) % 16  # exact in eight bits
    table = np.zeros((2, 0), np.int32)
    if page is not None:
        table = np.random.default_rng(0).permutation(2 * columns // page).reshape(2, -1).astype(np.int32)
        pool = np.empty((2 * columns // page, parts, page))
        pool[table] = held.reshape(2, parts, -1, page).swapaxes(1, 2)
        held = pool.reshape(len(pool), -1)
    cache = jnp.asarray(np.repeat(held[..., None], width, axis=-1), jnp.float8_e4m3fn)

    def gather(cache, table, lengths):
        return rows_of_all.gather_rows(cache, lengths, dealt, parallel, None if page is None else table)

    specs = (PartitionSpec(None, "t", None), PartitionSpec(), PartitionSpec())
    found = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))
    whole = (np.arange(parts * columns) + np.arange(2)[:, None]) % 16
    for longest, brought in ((75, parts * columns), (61, 64)):
        got = np.asarray(found(cache, table, np.array([5, longest], np.int32))).astype(np.float32)
        assert got.shape == (2, parts * columns, width)
        np.testing.assert_array_equal(got[:, :brought], np.repeat(whole[:, :brought, None], width, axis=-1))
        assert not got[:, brought:].any()
