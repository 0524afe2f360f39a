"""The latent-attention sub-layer: its output gate acts in every form of attention, and padding leaves no trace."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.cache import MlaCache
from kimi_jax.config import parse
from kimi_jax.layers.mla import Mla
from kimi_jax.layers.param import declared
from kimi_jax.ops.implementation import Implementations
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import choose_precision
from kimi_jax.testing.configs import config_json

CONFIG = parse(
    config_json(
        "tiny",
        hidden_size=48,
        num_attention_heads=3,
        q_lora_rank=20,
        kv_lora_rank=22,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=14,
    )
)
LENGTH = 90


@cache
def graph(impl):
    return nnx.split(Mla(CONFIG, choose_precision("float32"), Parallel.single(), Implementations(mla=impl)))[0]


@partial(jax.jit, static_argnames="impl")
def run(weights, x, start, new, latent, impl="reference"):
    flat = [(tuple(name.split(".")), nnx.Param(array)) for name, array in weights.items()]
    layer = nnx.merge(graph(impl), nnx.from_flat_state(flat))
    offsets = jnp.arange(x.shape[1])
    positions = jnp.where(offsets < new[:, None], start[:, None] + offsets, -1)
    out, held = layer(x, positions, new, start + new, MlaCache(latent))
    return out, held.latent


def weights(gate: float = 0.0) -> dict:
    """Random weights; ``gate`` is what the gate reads from the first channel of the input, and nothing else."""
    random = np.random.default_rng(0)
    specs = declared(Mla(CONFIG, choose_precision("float32"), Parallel.single(), Implementations()))
    result = {name: random.normal(size=spec.shape).astype(np.float32) / 5 for name, spec in specs.items()}
    result["g_proj.weight"] = np.zeros_like(result["g_proj.weight"])
    result["g_proj.weight"][:, 0] = gate
    return result


def tokens(count: int) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(1, count, CONFIG.hidden)).astype(np.float32)
    x[..., 0] = 1
    return x


def prefill_and_go_on(parameters: dict, calls: tuple[int, ...]) -> np.ndarray:
    x, start, outs = tokens(sum(calls)), 0, []
    latent = jnp.full((1, LENGTH, CONFIG.mla.row_dim), jnp.nan)
    for count in calls:
        out, latent = run(parameters, x[:, start : start + count], np.array([start]), np.array([count]), latent)
        start += count
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    "calls", [(80,), (72, 8), (70, 1, 1, 8)]
)  # direct; then absorbed with several queries, and with one
def test_a_gate_of_zero_halves_the_output_in_every_path(calls):  # PF-16
    ungated = prefill_and_go_on(weights(gate=100), calls)  # sigmoid(100) is 1
    np.testing.assert_array_equal(prefill_and_go_on(weights(gate=0), calls), ungated / 2)  # red when one form skips it
    np.testing.assert_allclose(ungated, prefill_and_go_on(weights(gate=100), (1,) * 2 + (78,)), atol=2e-5)


def test_padding_leaves_no_trace():  # PF-03
    parameters, x = weights(0.3), tokens(16)
    empty = jnp.zeros((1, LENGTH, CONFIG.mla.row_dim))
    out, latent = run(parameters, x, np.array([0]), np.array([5]), empty)
    x[:, 5:] = np.nan
    other, held = run(parameters, x, np.array([0]), np.array([5]), empty)
    np.testing.assert_array_equal(out[:, :5], other[:, :5])
    np.testing.assert_array_equal(latent, held)
    assert not np.asarray(held)[:, 5:].any()


def test_kernels_and_xla_are_one_layer():
    # red when the kernels are given another norm, gate, or place in the cache than the composition they replace
    parameters, x = weights(0.3), tokens(74)
    held = dict.fromkeys(("reference", "interpret"), jnp.full((1, LENGTH, CONFIG.mla.row_dim), jnp.nan))
    for start, new, count in ((0, 66, 70), (66, 2, 4)):
        outs = {}
        for impl, latent in held.items():
            piece = x[:, start : start + count]
            outs[impl], held[impl] = run(parameters, piece, np.array([start]), np.array([new]), latent, impl=impl)
        np.testing.assert_allclose(outs["interpret"][:, :new], outs["reference"][:, :new], rtol=0, atol=1e-5)
        np.testing.assert_allclose(held["interpret"], held["reference"], rtol=1e-6)
