import jax
import jax.numpy as jnp
import pytest

from kimi_jax.ops.indexer import api as index_op
from kimi_jax.ops.indexer.keys import IndexCache
from kimi_jax.ops.mla import sparse
from tests.ops.sparse_contract import SelectedContract


class TestSelected(SelectedContract):
    pass


def test_unknown_implementation_is_refused():
    # red when an unknown name runs something else
    empty = jnp.zeros((1, 1, 1, 2))
    with pytest.raises(ValueError, match=r"mla\.attend_selected has no implementation 'fast'; built: .*reference"):
        sparse.attend_selected(empty, empty[0], empty[0, 0], jnp.zeros((1, 1, 1), jnp.int32), nope_dim=1, impl="fast")


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("paged", [False, True])
def test_no_offset_leaves_32_bits_at_a_million_tokens(paged):
    # red when positions, heads and channels are flattened into one index (PF-60): at 8 x 1M x 576 elements, of which the
    # queries of 96 heads see all, every dimension of every array stays small
    rows, length, page, tokens, k = 8, 1 << 20, 64, 4, 2048
    pool = (rows * length // page, page) if paged else (rows, length)
    pages = array(rows, length // page, dtype=jnp.int32) if paged else None

    def step(q, w, keys, scales, positions, query, latent, expand, pages):
        selected = index_op.select(q, w, IndexCache(keys, scales), positions, k=k, pages=pages)
        return sparse.attend_selected(query, latent, expand, selected, nope_dim=128, pages=pages)

    jaxpr = jax.make_jaxpr(step)(
        array(rows, tokens, 32, 128),
        array(rows, tokens, 32, dtype=jnp.float32),
        array(*pool, 128, dtype=jnp.float8_e4m3fn),
        array(*pool, dtype=jnp.float32),
        array(rows, tokens, dtype=jnp.int32),
        array(rows, tokens, 96, 192),
        array(*pool, 576),
        array(96 * 256, 512),
        pages,
    )
    sizes = {size for shape in shapes(jaxpr.jaxpr) for size in shape}
    assert max(sizes) == length


def shapes(jaxpr) -> list[tuple[int, ...]]:
    """Of every value in a program and what it calls."""
    found = [var.aval.shape for equation in jaxpr.eqns for var in (*equation.invars, *equation.outvars)]
    for inner in called(jaxpr):
        found += shapes(inner)
    return found


def called(jaxpr) -> list:
    values = [value for equation in jaxpr.eqns for value in equation.params.values()]
    flat = [part for value in values for part in (value if isinstance(value, tuple | list) else (value,))]
    return [getattr(part, "jaxpr", part) for part in flat if hasattr(getattr(part, "jaxpr", part), "eqns")]
