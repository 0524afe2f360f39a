"""The kernels of latent attention, interpreted: the same contract as the reference, and every edge of their tiles."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.linear import api as linear
from kimi_jax.ops.mla import api, prefill, split
from tests.ops.mla_contract import AttendContract, PartialContract, ShapesContract, compiled, in_pages, make, oracle


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Several shares of several tiles, and several blocks, in a cache of 600 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "UNITS", 3)
        patch.setattr(split, "SHARE", 64)
        patch.setattr(prefill, "BLOCK", 512)
        yield


class TestKernelsAbsorbed(AttendContract):
    form, impl = "absorbed", "interpret"


class TestKernelsDirect(AttendContract):
    form, impl = "direct", "interpret"


@pytest.mark.slow
class TestShapesAbsorbed(ShapesContract):
    form, impl = "absorbed", "interpret"


@pytest.mark.slow
class TestShapesDirect(ShapesContract):
    form, impl = "direct", "interpret"


class TestKernelsPartial(PartialContract):
    impl = "interpret"


def edges(*tiles: int) -> list[int]:
    """Lengths just before, at and after every multiple of the tiles, up to the capacity."""
    near = {at + step for tile in tiles for at in range(0, 640, tile) for step in (-1, 0, 1)}
    return sorted(length for length in near if 0 <= length <= 640)


@pytest.mark.parametrize("form", ["absorbed", "direct"])
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    lengths=st.lists(st.sampled_from(edges(32, 64, 128)), min_size=2, max_size=2),
    new=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    seed=st.integers(0, 5),
)
def test_every_edge_of_a_tile_a_share_and_a_page(form, lengths, new, seed):
    # red when a share, a block or the last tile ends one row early or late, or a page is taken for its neighbour
    case = make(seed, lengths, tokens=3, length=640)
    offset, count = np.arange(3), np.minimum(new, lengths)[:, None]
    case = case._replace(
        positions=np.where(offset < count, case.lengths[:, None] - count + offset, -1).astype(np.int32)
    )
    expected = oracle(case)
    for row in range(2):
        case.cache[row, lengths[row] :] = np.nan
    pool, table = in_pages(case, 64, seed)
    got = compiled(form, "interpret")(*map(jnp.asarray, pool), pages=jnp.asarray(table))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_eight_bits_between_two_and_four_billion_elements_are_refused():
    cache = jax.ShapeDtypeStruct((4, 1 << 20, 576), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"lies between 2\^31 and 2\^32.*nearest that works: 3 or 8 of 4 sequences"):
        api.attend(np.zeros((4, 1, 3, 7)), cache, None, None, None, nope_dim=5, impl="pallas")


def test_pages_that_cut_a_tile_are_refused():
    cache, table = jax.ShapeDtypeStruct((9, 40, 13), jnp.float32), np.zeros((1, 3))
    with pytest.raises(ValueError, match="pages of 40 rows do not hold whole tiles of 32; nearest that works: 32"):
        api.attend(np.zeros((1, 1, 3, 7)), cache, None, None, None, nope_dim=5, pages=table, impl="interpret")


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 2), (2, 40)])
def test_queries_absorbed_beside_a_write_are_the_same(rows, tokens):
    # red when a program of a row stands where one of a head was, or a later block of tokens is left out
    random = np.random.default_rng(0)
    query, expand = random.normal(size=(rows, tokens, 3, 7)), random.normal(size=(3 * (5 + 4), 40))
    query, expand = jnp.asarray(query, jnp.float32), jnp.asarray(expand, jnp.float32)
    new = api.NewRows(jnp.ones((rows, tokens, 42)), jnp.zeros(rows, jnp.int32), jnp.full(rows, tokens), None)
    alone = api.absorb(query, expand, nope_dim=5, impl="interpret")
    moved, _ = api.absorb_and_write(
        jnp.zeros((rows, 64, 42)), query, expand, new, nope_dim=5, eps=0.0, impl="interpret"
    )
    np.testing.assert_array_equal(moved.rows, alone)


@pytest.mark.parametrize(("rows", "tokens", "nope", "heads"), [(1, 1, 5, 3), (2, 3, 16, 2)])
def test_queries_projected_in_the_launch_that_absorbs_them(rows, tokens, nope, heads):
    # red when a head projects with another's rows, the shared part is of the wrong ones, or the norm is left out
    random, shared, latent, width = np.random.default_rng(0), 4, 150, 300
    array = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    query = api.Latents(array(rows, tokens, width), array(width), array(heads * (nope + shared), width))
    expand, new = array(heads * (nope + 6), latent), array(rows, tokens, latent + shared)
    fresh = api.NewRows(new, jnp.full(rows, 3), jnp.full(rows, tokens), None)
    enter = jax.jit(partial(api.project_absorb_and_write, nope_dim=nope, query_eps=0.5, eps=0.0, impl="interpret"))
    moved, held = enter(jnp.zeros((rows, 64, latent + shared)), query, expand, fresh)
    projected = linear.project_normed(query.rows, query.norm, 0.5, query.weight)
    expected = api.absorb(projected.reshape(rows, tokens, heads, -1), expand, nope_dim=nope)
    np.testing.assert_allclose(moved.rows, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(held[:, 3 : 3 + tokens], new)
