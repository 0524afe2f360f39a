"""The kernels of K3.1 Pro's sparse attention at full size, built for an MI355X: 32 index heads, a million keys, 2,048 chosen rows.

That a kernel is built says that its local memory suffices: the compiler refuses more than 160 KiB.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from kimi_jax.ops.indexer import kernels, pallas_write
from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.mla import sparse, sparse_kernels

HEADS, WIDTH, CONTEXT, K = 32, 128, 1 << 20, 2048
OWN_HEADS, ALL_HEADS, NOPE, QUERY, VALUE, LATENT, ROW = 12, 96, 128, 192, 128, 512, 576
BFLOAT16, FLOAT32, FLOAT8, INT32, UINT8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.int32, jnp.uint8

FORMS = {
    "bf16": [((WIDTH,), BFLOAT16)],
    "fp8": [((WIDTH,), FLOAT8), ((), FLOAT32)],
    "mxfp4": [((WIDTH // 2,), UINT8), ((WIDTH // 32,), UINT8)],
}
"""Key format -> what is held for each token."""


def fit(built: list[Any], *known: str) -> None:
    """Nothing but these kernels, and nothing in memory that belongs in registers."""
    assert [kernel for kernel in built if kernel.spills or kernel.scratch] == []
    # one that another test has built is not built again
    assert {kernel.name.split("__")[0] for kernel in built} <= set(known)


def index(form: str, rows: int, page: int | None) -> list[tuple[tuple[int, ...], Any]]:
    held = (rows, CONTEXT) if page is None else (rows * CONTEXT // page, page)
    return [((*held, *shape), dtype) for shape, dtype in FORMS[form]]


@pytest.mark.parametrize(
    ("rows", "tokens", "form", "page"),
    [
        (1, 1, "fp8", None),
        (8, 1, "mxfp4", 64),
        (1, 8, "bf16", None),
        (1, 64, "fp8", 64),
        pytest.param(8, 1, "fp8", 64, marks=pytest.mark.slow),
        pytest.param(1, 64, "mxfp4", None, marks=pytest.mark.slow),
    ],
)
def test_scores_and_choice(build, rows, tokens, form, page):
    def select(q: Any, w: Any, positions: Any, keys: Any, *rest: Any) -> Any:
        scales, rest = (rest[0], rest[1:]) if len(FORMS[form]) > 1 else ((), rest)
        return kernels.select(q, w, IndexCache(keys, scales), positions, *rest, k=K)

    asked = [((rows, tokens, HEADS, WIDTH), BFLOAT16), ((rows, tokens, HEADS), FLOAT32), ((rows, tokens), INT32)]
    table = [] if page is None else [((rows, CONTEXT // page), INT32)]
    built = build(select, *asked, *index(form, rows, page), *table)
    # red when a position is computed outside of a kernel, or with sixteen tokens a program
    fit(built, "index_scores", "index_top_k")


@pytest.mark.parametrize(
    ("rows", "tokens", "latent", "page"),
    [(1, 1, BFLOAT16, None), (8, 1, FLOAT8, 64), (1, 2048, BFLOAT16, 64)],
)
def test_attention_over_the_choice(build, rows, tokens, latent, page):
    run = partial(sparse_kernels.attend, nope_dim=NOPE, budget=sparse.BYTES)
    held = (rows, CONTEXT) if page is None else (rows * CONTEXT // page, page)
    table = [] if page is None else [((rows, CONTEXT // page), INT32)]
    built = build(
        lambda query, expand, gate, latent, chosen, *table: run(query, latent, expand, chosen, gate, *table),
        ((rows, tokens, OWN_HEADS, QUERY), BFLOAT16),
        ((OWN_HEADS * (NOPE + VALUE), LATENT), BFLOAT16),
        ((rows, tokens, OWN_HEADS, VALUE), BFLOAT16),
        ((*held, ROW), latent),
        ((rows, tokens, K), INT32),
        *table,
    )
    # red when rows are gathered outside of a kernel: 2 MB a token
    fit(built, "mla_absorb", "mla_attend_selected", "mla_merge_expand")


def test_a_part_for_all_heads(build):
    run = partial(sparse_kernels.attend_partial, latent_dim=LATENT, scale=QUERY**-0.5, budget=sparse.BYTES)
    shapes = ((1, 1, ALL_HEADS, ROW), BFLOAT16), ((1, CONTEXT // 8, ROW), FLOAT8), ((1, 1, K), INT32)
    fit(build(run, *shapes), "mla_attend_selected", "mla_merge")  # red with 32 heads a program on jax 0.12, 64 on 0.10


@pytest.mark.parametrize("form", FORMS)
def test_new_keys(build, form):
    def write(keys: Any, starts: Any, weight: Any, bias: Any, table: Any, *held: Any) -> Any:
        norm, index = pallas_write.KeyNorm(weight, bias), IndexCache(*held)
        return pallas_write.write(index, keys, starts, starts, norm, table, eps=1e-5, dtype=BFLOAT16)

    asked = [((8, 2, WIDTH), FLOAT32), ((8,), INT32), ((WIDTH,), BFLOAT16), ((WIDTH,), BFLOAT16)]
    fit(build(write, *asked, ((8, CONTEXT // 64), INT32), *index(form, 8, 64)), "index_write")  # copies are not kernels
