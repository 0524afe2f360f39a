"""What every implementation of attention over chosen rows must do, against float64 and the golden parts of k31-tiny."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.mla import api, sparse
from tests.conftest import FIXTURES
from tests.ops.mla_contract import HEADS, LATENT, NOPE, SHARED, VALUE, Case, in_pages, jitted, make


def choose(case: Case, k: int, seed: int = 0) -> np.ndarray:
    """A random choice of up to ``k`` positions for every query, ascending, -1 at the end; fewer where fewer are visible."""
    random = np.random.default_rng(seed)
    chosen = np.full((*case.positions.shape, k), -1, np.int32)
    for at in np.ndindex(case.positions.shape):
        some = random.permutation(case.positions[at] + 1)[:k]
        chosen[at][: len(some)] = np.sort(some)
    return chosen


def mask_form(case: Case, chosen: np.ndarray) -> np.ndarray:
    """Dense attention with everything else masked out, in float64."""
    query, held, expand = (np.asarray(array, np.float64) for array in case[:3])
    per_head = expand.reshape(HEADS, NOPE + VALUE, LATENT)
    keys = np.einsum("bsr,ndr->bsnd", held[..., :LATENT], per_head)
    score = np.einsum("btnd,bsnd->btns", query[..., :NOPE], keys[..., :NOPE])
    score = (score + np.einsum("btnd,bsd->btns", query[..., NOPE:], held[..., LATENT:])) / np.sqrt(NOPE + SHARED)
    allowed = (np.arange(held.shape[1]) == chosen[..., None]).any(axis=2)[:, :, None]
    score = np.where(allowed, score, -np.inf)
    top = score.max(axis=-1, keepdims=True, initial=-1e30)
    weight = np.exp(score - top)
    weight = weight / np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("btns,bsnv->btnv", weight, keys[..., NOPE:])


@cache
def attending(impl: str, budget: int = sparse.BYTES):
    return jitted(partial(sparse.attend_selected, nope_dim=NOPE, impl=impl, budget=budget), impl)


@cache
def attending_partial(impl: str, latent_dim: int, scale: float):
    return jitted(partial(sparse.attend_selected_partial, latent_dim=latent_dim, scale=scale, impl=impl), impl)


class SelectedContract:
    """What every implementation of attend_selected and attend_selected_partial must do. Subclasses set `impl`."""

    impl = "reference"
    tolerance = 3e-6

    def attend(self, case: Case, chosen: np.ndarray, **options) -> np.ndarray:
        run = attending(self.impl, **options)
        return np.asarray(run(*map(jnp.asarray, case[:3]), chosen))

    def partial(self, query, latent, chosen, latent_dim, scale) -> tuple[np.ndarray, np.ndarray]:
        value, log = attending_partial(self.impl, latent_dim, scale)(query, latent, chosen)
        assert value.dtype == log.dtype == jnp.float32
        return np.asarray(value), np.asarray(log)

    def assert_right(self, case: Case, chosen: np.ndarray, tolerance: float = 0, **options) -> None:
        expected = mask_form(case, chosen)
        limit = (tolerance or self.tolerance) * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(self.attend(case, chosen, **options), expected, rtol=0, atol=limit)

    @pytest.mark.parametrize("budget", [1 << 28, 1])
    def test_gather_is_mask(self, budget):
        # red when a row of another token, sequence or chunk of queries is gathered
        case = make(0, [300, 40], tokens=5, padding=1)
        self.assert_right(case, choose(case, 24), budget=budget)

    def test_everything_chosen_is_dense(self):
        # red when a -1 at the end is taken for position 0 (K3.1 Pro notes, section 4, rule 7)
        case = make(1, [20, 7], tokens=3, length=40)
        run = partial(api.attend, nope_dim=NOPE, form="absorbed")
        dense = np.asarray(jax.jit(run)(*map(jnp.asarray, case)))
        np.testing.assert_allclose(self.attend(case, choose(case, 32)), dense, rtol=0, atol=self.tolerance)

    def test_pages(self):
        # red when a position is looked up in the page of another, or in another sequence's
        case = make(2, [70, 33], tokens=2, length=96)
        chosen = choose(case, 16)
        pool, table = in_pages(case, 32)
        run = attending(self.impl)
        found = np.asarray(run(*map(jnp.asarray, pool[:3]), chosen, pages=table))
        np.testing.assert_allclose(found, mask_form(case, chosen), rtol=0, atol=self.tolerance * 10)

    def test_what_is_not_chosen_may_be_anything(self):
        # red when a row with weight zero is multiplied, or what fills up reads row 0
        case = make(3, [50, 30], tokens=2, length=64, padding=1)
        chosen = choose(case, 12)
        chosen[chosen == 0] = -1
        clean = self.attend(case, chosen)
        left = np.ones((2, 64), bool)
        for row in range(2):
            left[row, np.unique(chosen[row][chosen[row] >= 0])] = False
        case.cache[left] = np.nan
        np.testing.assert_array_equal(self.attend(case, chosen), clean)
        assert not clean[:, 1:].any()  # padding

    @pytest.mark.parametrize("dtype, tolerance", [(ml_dtypes.bfloat16, 2e-2), (ml_dtypes.float8_e4m3fn, 2e-2)])
    def test_narrow_rows(self, dtype, tolerance):
        # red when a narrow cache is read as something else; the operands stay those of the weight
        case = make(4, [60, 40], tokens=2, length=64)
        case = case._replace(cache=case.cache.astype(dtype))
        self.assert_right(case, choose(case, 12), tolerance)

    def test_the_gate_and_its_dtype(self):
        # red when the gate is left out, or of another token or head (PF-16)
        case, random = make(5, [60, 40], tokens=2, length=64), np.random.default_rng(0)
        gate = random.normal(size=(2, 2, HEADS, VALUE)).astype(np.float32)
        chosen = choose(case, 12)
        run = attending(self.impl)
        found = run(*map(jnp.asarray, case[:3]), chosen, gate=jnp.asarray(gate))
        expected = mask_form(case, chosen) / (1 + np.exp(-gate))
        np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance)
        narrow = run(*map(jnp.asarray, case[:3]), chosen, gate=jnp.asarray(gate, jnp.bfloat16))
        assert narrow.dtype == jnp.bfloat16

    @pytest.mark.parametrize("parts", [2, 8])
    def test_parts_of_the_golden_rows(self, parts):
        # red when the logarithm has another base, or nothing chosen gives not a number
        with np.load(FIXTURES / "k31-tiny" / "golden.npz") as golden:
            names = ("own", "o", "lse")
            given = {name: golden[f"dcp/n{parts}_i1/{name}"] for name in names}
            q = np.concatenate([golden["dcp/q_latent"], golden["dcp/q_shared"]], axis=-1)
            rows, scale = golden["dcp/rows"], float(golden["dcp/scale"])
        latent = given["o"].shape[-1]
        for part in range(parts):
            local = rows[part::parts]
            chosen = given["own"][part][None].astype(np.int32)
            value, log = self.partial(q[None], local[None], chosen, latent, scale)
            np.testing.assert_allclose(value[0], given["o"][part], rtol=0, atol=1e-5)
            np.testing.assert_allclose(log[0], given["lse"][part], rtol=0, atol=1e-5)
