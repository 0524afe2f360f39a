from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.cache import KdaCache, MlaCache, describe, describe_slots, reset, write_keys, write_rows
from kimi_jax.config import load_config, parse
from kimi_jax.ops.indexer.keys import decode
from kimi_jax.ops.mla import api as mla
from kimi_jax.ops.norm import rms_norm
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.precision import Precision, choose_precision
from kimi_jax.testing.configs import config_json, with_indexer


class Norm(NamedTuple):
    """A norm as a layer hands it over."""

    weight: jax.Array
    eps: float = 1e-6

    def __call__(self, x):
        return rms_norm(x, self.weight, self.eps)


@cache
def writing(store):
    return jax.jit(store)


def store_beside_queries(latent, new, starts, counts, *, norm=None, pages=None):
    """``write_rows`` as a decode step's kernel has it: in the launch that absorbs the queries of the same tokens."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    rows = mla.NewRows(new, starts, counts, weight)
    query, expand = jnp.ones((*new.shape[:2], 2, 5)), jnp.ones((2 * (3 + 4), 6))
    return mla.absorb_and_write(latent, query, expand, rows, nope_dim=3, eps=eps, pages=pages, impl="interpret")[1]


class TestDescribe:
    def test_sizes_of_kimi_k3(self):  # text-model section 7
        layers = describe(load_config("k3"), 1, 1 << 20, Precision())
        kda = [entry for entry in layers if isinstance(entry, KdaCache)]
        mla = [entry for entry in layers if isinstance(entry, MlaCache)]
        assert (len(kda), len(mla)) == (69, 24)
        assert sum(entry.state.nbytes for entry in kda) == 69 * 96 * 128 * 128 * 4
        assert sum(entry.conv.nbytes for entry in kda) == 69 * 3 * 12288 * 3 * 2
        assert sum(entry.latent.nbytes for entry in mla) == 28_991_029_248  # 28.99 GB

    @pytest.mark.parametrize(
        ("dtype", "kv_dtype", "latent", "conv"),
        [
            ("bfloat16", None, "bfloat16", "bfloat16"),
            ("bfloat16", "fp8", "float8_e4m3fn", "bfloat16"),
            ("float32", None, "float32", "float32"),
        ],
    )
    def test_dtypes(self, dtype, kv_dtype, latent, conv):
        config = parse(config_json("tiny", kda_heads=4, kda_head_dim=24))
        kda, *_, mla = describe(config, 3, 50, choose_precision(dtype, kv_dtype, platform="rocm"))
        assert (mla.latent.shape, mla.latent.dtype) == ((3, 50, 80), np.dtype(latent))
        assert (kda.conv.shape, kda.conv.dtype) == ((3, 3, 3, 96), np.dtype(conv))
        assert (kda.state.shape, kda.state.dtype) == ((3, 4, 24, 24), np.float32)  # PF-07: whatever the dtype
        assert kda.conv.axes == ("batch", None, None, "heads") and kda.conv.logical[-1] == 4  # PF-25: cut by head
        assert mla.latent.axes == ("batch", "sequence", None)


def written(old, new, starts, counts):
    """Token by token, the plain way."""
    result = np.array(old)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in range(count):
            if start + token < result.shape[1]:
                result[row, start + token] = new[row, token]
    return result


class WriteContract:
    """What every implementation of write_rows must do. Subclasses set `store`."""

    store = staticmethod(write_rows)

    def write(self, *arrays, **options):
        return writing(self.store)(*arrays, **options)

    @staticmethod
    def old(rows=2, length=6, dtype=np.float32):
        return np.arange(rows * length * 2).reshape(rows, length, 2).astype(dtype)

    @pytest.mark.parametrize(
        ("rows", "length", "tokens"), [(2, 6, 1), (3, 6, 4), (1, 6, 6), (2, 6, 9), (1, 1, 1), (2, 1, 3), (9, 6, 4)]
    )
    def test_rows_land_at_their_positions_and_nowhere_else(self, rows, length, tokens):  # PF-62
        old = self.old(rows, length)
        new = -1.0 - np.arange(rows * tokens * 2, dtype=np.float32).reshape(rows, tokens, 2)
        random = np.random.default_rng(0)
        for start in range(length + 2):
            for count in range(tokens + 1):
                starts, counts = random.integers(0, length + 1, rows), random.integers(0, tokens + 1, rows)
                starts[0], counts[0] = start, count
                padded = np.where(np.arange(tokens)[None, :, None] < counts[:, None, None], new, np.nan)
                got = self.write(old, padded.astype(np.float32), starts, counts)
                # red when a slice that is clamped at the end lands on old rows, or padding is written
                np.testing.assert_array_equal(got, written(old, new, starts, counts))

    def test_a_full_row_beside_one_with_room(self):
        got = self.write(self.old(), -np.ones((2, 1, 2), np.float32), np.array([6, 5]), np.array([1, 1]))
        np.testing.assert_array_equal(got[0], self.old()[0])
        np.testing.assert_array_equal(got[1, 5], -1)

    def test_eight_bits_saturate(self):
        values = np.array([[448, 449, 1e4, np.inf, -460, -1e30, 0.3, np.nan]], np.float32).reshape(1, 4, 2)
        got = self.write(jnp.zeros((1, 4, 2), jnp.float8_e4m3fn), values, np.array([0]), np.array([4]))
        rounded = np.float32(ml_dtypes.float8_e4m3fn(0.3))
        expected = np.array([448, 448, 448, 448, -448, -448, rounded, np.nan], np.float32)
        np.testing.assert_array_equal(np.asarray(got, np.float32).ravel(), expected)  # red (NaN) without the limit

    def test_bfloat16_is_rounded_to_nearest(self):
        values = np.random.default_rng(0).normal(size=(1, 6, 2)).astype(np.float32)
        got = self.write(jnp.zeros((1, 6, 2), jnp.bfloat16), values, np.array([0]), np.array([6]))
        np.testing.assert_array_equal(got, values.astype(ml_dtypes.bfloat16))

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_the_first_part_is_normalised_in_the_official_order(self, dtype):  # text-model section 2.1
        random = np.random.default_rng(0)
        new, weight = random.normal(size=(2, 3, 7)).astype(dtype), random.normal(size=5).astype(dtype)
        run = jax.jit(lambda *arrays, weight: self.store(*arrays, norm=Norm(weight)))
        got = run(jnp.zeros((2, 4, 7), dtype), new, np.array([0, 1]), np.array([3, 2]), weight=weight)
        wide = new[..., :5].astype(np.float32)
        scaled = (wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + np.float32(1e-6))).astype(dtype)
        expected = np.concatenate([scaled * weight, new[..., 5:]], axis=-1)
        # red when the weight acts before the rounding, or on what follows the latent
        tolerance = 1e-6 if dtype == np.float32 else 0
        for row, start, count in ((0, 0, 3), (1, 1, 2)):
            placed = np.asarray(got[row, start : start + count], np.float32)
            np.testing.assert_allclose(placed, expected[row, :count].astype(np.float32), rtol=tolerance, atol=0)

    def test_pages_in_any_order(self):
        pool = np.arange(5 * 32 * 2, dtype=np.float32).reshape(5, 32, 2)
        pages = np.array([[3, 0], [1, 4]], np.int32)
        new = -1.0 - np.arange(2 * 6 * 2, dtype=np.float32).reshape(2, 6, 2)
        for starts, counts in (([30, 0], [4, 0]), ([0, 61], [6, 6]), ([63, 64], [1, 1]), ([26, 31], [6, 2])):
            got = self.write(pool, new, np.array(starts), np.array(counts), pages=pages)
            expected = pool.copy()
            expected[pages] = written(pool[pages].reshape(2, 64, 2), new, starts, counts).reshape(2, 2, 32, 2)
            np.testing.assert_array_equal(got, expected)  # red when a row past the table lands in the last page


class TestWriteKernel(WriteContract):
    store = staticmethod(partial(write_rows, impl="interpret"))


class TestWriteBesideQueries(WriteContract):
    store = staticmethod(store_beside_queries)


class TestWriteRows(WriteContract):
    def test_one_program_for_all_positions(self):  # PF-10
        traced = []
        program = jax.jit(lambda *args: traced.append(1) or write_rows(*args))
        for start in range(4):
            program(self.old(), np.ones((2, 1, 2), np.float32), np.full(2, start, np.int32), np.ones(2, np.int32))
        assert len(traced) == 1


class TestReset:
    def test_only_rows_marked_fresh_are_cleared(self):  # PF-05, PF-11
        config = parse(config_json("tiny"))
        filled = jax.tree.map(
            lambda spec: jnp.full(spec.shape, 7, spec.dtype).at[1].set(jnp.nan),
            describe(config, 3, 8, Precision()),
            is_leaf=lambda leaf: hasattr(leaf, "logical"),
        )
        cleared = jax.jit(reset)(filled, np.array([True, True, False]))
        for before, after in zip(filled, cleared, strict=True):
            assert type(after) is type(before)
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                assert new.dtype == old.dtype
                np.testing.assert_array_equal(new[2], old[2])
                if isinstance(after, KdaCache):
                    assert not np.asarray(new[:2], np.float32).any()  # red (NaN) when cleared by a product with 0


class TestWriteKeys:
    """Index keys and their scales, in every format, where the latent rows of the same tokens lie."""

    @staticmethod
    def caches(form, paged):
        config = parse(with_indexer(config_json("tiny"), index_head_dim=32))
        precision = replace(choose_precision("float32"), index=form)
        described = (
            describe_slots(config, 2, 6, 4, 0, precision).layers if paged else describe(config, 2, 12, precision)
        )
        entry = next(entry for entry in described if isinstance(entry, MlaCache))
        return jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), entry.index, is_leaf=lambda s: isinstance(s, ArraySpec)
        )

    @pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
    @pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8", "mxfp4"])
    def test_keys_land_where_rows_do(self, form, paged):
        # red when a scale is written elsewhere than its key, padding is written, or a page of another sequence is
        index = self.caches(form, paged)
        pages = jnp.array([[4, 0, 2], [1, 5, 3]], jnp.int32) if paged else None
        keys = np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32) * 9
        write = jax.jit(write_keys)
        once = write(index, keys, jnp.array([6, 0]), jnp.array([5, 3]), pages=pages)
        twice = index
        for start, count in (((6, 0), (2, 0)), ((8, 0), (3, 3))):
            shifted = np.stack([np.roll(keys[0], 6 - start[0], axis=0), keys[1]])
            twice = write(twice, shifted, jnp.array(start), jnp.array(count), pages=pages)
        jax.tree.map(np.testing.assert_array_equal, once, twice)
        held = np.asarray(decode(once))
        whole = held[np.asarray(pages)].reshape(2, 12, 32) if paged else held
        expected = np.zeros_like(whole)
        expected[0, 6:11], expected[1, :3] = keys[0], keys[1, :3]
        limit = {"float32": 0, "bfloat16": 2**-8, "fp8": 2**-3, "mxfp4": 0.5}[form] * np.abs(keys).max()
        assert np.abs(whole - expected).max() <= limit
        assert not whole[expected == 0].any()
        sizes = {"float32": 128, "bfloat16": 64, "fp8": 36, "mxfp4": 17}
        assert sum(array.nbytes for array in once if isinstance(array, jax.Array)) == sizes[form] * 24
