"""The indexer of a latent-attention layer: golden keys, weights and queries, and short contexts that run dense."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.cache import IndexCache, MlaCache
from kimi_jax.config import parse
from kimi_jax.layers.indexer import Indexer
from kimi_jax.layers.mla import Mla
from kimi_jax.layers.param import declared
from kimi_jax.ops.implementation import Implementations
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import choose_precision
from kimi_jax.testing.configs import config_json, with_indexer
from tests.ops.indexer_contract import case, cases

FLOAT32 = choose_precision("float32")
KEPT, LENGTH, TOKENS = 16, 40, 6

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
DENSE = parse(config_json("tiny", **SIZES))
SPARSE = parse(with_indexer(config_json("tiny", **SIZES), index_n_heads=5, index_head_dim=8, index_topk=KEPT))


def build(kind, config, weights):
    graph = nnx.split(kind(config, FLOAT32, Parallel.single(), Implementations()))[0]
    return nnx.merge(graph, nnx.from_flat_state([(tuple(n.split(".")), nnx.Param(a)) for n, a in weights.items()]))


@pytest.mark.parametrize("name", cases("indexer"))
def test_golden_keys_weights_and_queries(name):
    # red when keys are not centred, the eps is the relatives' 1e-6, a bias is left out, or heads are not major in wq_b
    given = case("indexer", name)
    heads, width = given["q"].shape[1:]
    sizes = {"hidden_size": given["x"].shape[1], "q_lora_rank": given["cq"].shape[1]}
    config = parse(with_indexer(config_json("tiny", **sizes), index_n_heads=heads, index_head_dim=width))
    weights = {
        "wq_b.weight": given["wq_b"],
        "wk.weight": given["wk"],
        "weights_proj.weight": given["weights_proj"],
        "k_norm.weight": given["k_norm_weight"],
        "k_norm.bias": given.get("k_norm_bias", np.zeros_like(given["k_norm_weight"])),
    }
    indexer = build(Indexer, config, weights)
    key, w = indexer.read(given["x"][None])
    q = indexer.wq_b(jnp.asarray(given["cq"][None])).reshape(1, -1, heads, width)
    for found, expected in ((indexer.k_norm(key), "k"), (w, "w"), (q, "q")):
        np.testing.assert_allclose(found[0], given[expected], rtol=0, atol=1e-4, err_msg=expected)


def run(config, weights, x, start, cache):
    @partial(jax.jit, static_argnums=0)
    def call(config, weights, x, start, cache):
        positions = start + jnp.arange(x.shape[1])[None]
        new = jnp.array([x.shape[1]])
        return build(Mla, config, weights)(x, positions, new, start + new, cache)

    return call(config, weights, x, start, cache)


def test_a_short_context_is_dense_to_the_last_bit_and_its_keys_are_kept():
    # red when a context of what is kept runs another program than dense attention, when garbage past it is read, or when the
    # keys of a dense call are not written (K3.1 Pro notes, section 5): the next call, past what is kept, then differs
    random = np.random.default_rng(0)
    specs = declared(Mla(SPARSE, FLOAT32, Parallel.single(), Implementations()))
    weights = {name: random.normal(size=spec.shape).astype(np.float32) / 5 for name, spec in specs.items()}
    plain = {name: array for name, array in weights.items() if "indexer" not in name}
    x = random.normal(size=(1, KEPT + TOKENS, 48)).astype(np.float32)
    latent = np.full((1, LENGTH, 28), np.nan, np.float32)
    keys = np.full((1, LENGTH, 8), np.nan, np.float32)
    dense, _ = run(DENSE, plain, x[:, :KEPT], 0, MlaCache(latent))
    short, held = run(SPARSE, weights, x[:, :KEPT], 0, MlaCache(latent, IndexCache(keys)))
    np.testing.assert_array_equal(short, dense)
    assert np.isfinite(held.index.keys[:, :KEPT]).all() and np.isnan(held.index.keys[:, KEPT:]).all()
    more, _ = run(SPARSE, weights, x[:, KEPT:], KEPT, held)
    whole, _ = run(SPARSE, weights, x, 0, MlaCache(latent, IndexCache(keys)))
    np.testing.assert_allclose(more, whole[:, KEPT:], rtol=0, atol=1e-5)
    assert np.isfinite(more).all()
