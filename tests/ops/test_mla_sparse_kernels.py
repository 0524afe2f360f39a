"""The kernels of attention over chosen rows, interpreted: the same contract as the reference, and every edge of their tiles."""

from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.mla import merge, sparse, sparse_split
from tests.ops.mla_contract import NOPE, in_pages, jitted, make
from tests.ops.sparse_contract import SelectedContract, choose, mask_form


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Two shares of two tiles, and several steps that join shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_split, "SHARE", 64)
        patch.setattr(merge, "PARTS", 4)
        yield


def slow(*values):
    """Cases that add little to those beside them, and a program each."""
    return pytest.param(*values, marks=pytest.mark.slow)


class TestSelected(SelectedContract):
    impl = "interpret"

    @pytest.mark.parametrize("budget", [slow(1 << 28), 1])
    def test_gather_is_mask(self, budget):
        super().test_gather_is_mask(budget)

    @pytest.mark.parametrize("dtype, tolerance", [slow(ml_dtypes.bfloat16, 2e-2), (ml_dtypes.float8_e4m3fn, 2e-2)])
    def test_narrow_rows(self, dtype, tolerance):
        super().test_narrow_rows(dtype, tolerance)

    @pytest.mark.parametrize("parts", [2, slow(8)])
    def test_parts_of_the_golden_rows(self, parts):
        super().test_parts_of_the_golden_rows(parts)


K, LENGTH = 100, 200
"""Chosen rows, three whole tiles and a part of one in two shares, of so many cached ones."""


@cache
def paged():
    return jitted(partial(sparse.attend_selected, nope_dim=NOPE, impl="interpret"), "interpret")


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    counts=st.lists(st.sampled_from([0, 1, 31, 32, 33, 64, 96, 99, 100]), min_size=6, max_size=6),
    seed=st.integers(0, 5),
    front=st.booleans(),
)
def test_every_edge_of_a_tile_and_a_share(counts, seed, front):
    # red when a share ends one row early or late, what no share holds is joined, or rows behind a gap are left out
    case = make(seed, [LENGTH, 150], tokens=3, length=LENGTH)
    chosen = choose(case, K, seed)
    chosen = np.where(np.arange(K) < np.array(counts).reshape(2, 3, 1), chosen, -1)
    if not front:
        chosen = np.ascontiguousarray(chosen[..., ::-1])
    pool, table = in_pages(case, 24, seed)
    found = np.asarray(paged()(*map(jnp.asarray, pool[:3]), chosen, pages=table))
    np.testing.assert_allclose(found, mask_form(case, chosen), rtol=0, atol=1e-5)
