"""Parts of the update of a language model, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax.ops.moe import api as moe
from kimi_jax.ops.situ import api as situ
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.quant import mxfp4
from kimi_jax.train import balance, qat
from kimi_jax.train.attention import chosen
from kimi_jax.train.optimiser import Rates, kind_of, optimiser
from kimi_jax.train.packing import Buckets, Packed, from_list
from kimi_jax.train.state import TrainingError

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


def test_masters_have_the_experts_sum_and_its_gradient_however_uneven_the_routing():
    # red when later rounds are left out of the result or of the gradient (an expert is asked by every token here)
    tokens, experts, top_k, latent, ffn = 40, 8, 3, 32, 32
    ids = np.argsort(RANDOM.random((tokens, experts)), 1)[:, :top_k].astype(np.int32)
    ids[:30, 0], ids[:30, 1:] = 2, np.array([5, 7])
    ids[36:] = experts  # padding
    given = normal(tokens, latent), jnp.abs(normal(tokens, top_k)), normal(experts, ffn, latent) / 6
    given += normal(experts, ffn, latent) / 6, normal(experts, latent, ffn) / 6

    def dense(z, weights, w1, w3, w2):
        gates = jnp.zeros((tokens, experts)).at[jnp.arange(tokens)[:, None], ids].add(weights, mode="drop")
        up = [jnp.einsum("tl,efl->tef", z, w, precision="highest") for w in (w1, w3)]
        return jnp.einsum("tef,elf,te->tl", situ.situ(*up, 4.0, 25.0), w2, gates, precision="highest")

    def masters(z, weights, *w):
        return moe.experts(z, jnp.asarray(ids), weights, moe.ExpertMasters(*w), beta=4.0, linear_beta=25.0)

    cotangent = normal(tokens, latent)
    found = [jax.jit(lambda *x, f=f: (*jax.vjp(f, *x)[1](cotangent), f(*x)))(*given) for f in (masters, dense)]
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-5 * float(jnp.max(jnp.abs(wanted))))


def test_projection_is_what_is_stored_and_passes_gradients_through():
    # red when a tie goes to an odd code, or the projection has the gradient of its steps (zero)
    values = np.exp(3 * RANDOM.standard_normal((16, 64))).astype(np.float32) * RANDOM.choice([-1, 1], (16, 64))
    values[0] = np.tile([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -6, -5, -0.25, 3, 1e-30, 0, 2], 4)
    values[1], values[2] = 0, 3
    got, back = jax.vjp(jax.jit(qat.mxfp4_through), jnp.asarray(values, jnp.float32))
    packed, scale = mxfp4.encode(jnp.asarray(values, jnp.float32))
    assert np.array_equal(got, mxfp4.decode(packed, scale))
    again = mxfp4.encode(got)
    assert np.array_equal(again[0], packed) and np.array_equal(again[1], scale)
    np.testing.assert_array_equal(back(jnp.ones_like(got))[0], 1)


def test_balanced_bias_spreads_skewed_tokens():
    # red when the quantile is (E - k)/E, or scores are taken for needs
    experts, top_k, tokens = 16, 4, 4000
    scores = jax.nn.sigmoid(normal(tokens, experts) + jnp.linspace(-3, 3, experts))
    bias, real = jnp.zeros(experts), jnp.arange(tokens) < 3000

    @jax.jit
    def balanced(bias):
        needed = balance.needs(scores, bias, top_k)
        return balance.next_bias(balance.histogram(needed, bias, real), bias, top_k)

    def load(bias):
        ids = jax.lax.top_k((scores + bias)[:3000], top_k)[1]
        return float(np.bincount(np.ravel(ids), minlength=experts).max()) * experts / (3000 * top_k)

    before = load(bias)
    for _ in range(8):
        bias = balanced(bias)
    assert before > 3 and load(bias) < 1.1
    assert abs(float(jnp.mean(bias))) < 1e-6


def test_muon_turns_every_head_and_expert_by_itself():
    # red when heads are orthogonalised as one matrix, or the scale is that of the whole matrix
    specs = {
        "model.layers.0.self_attn.q_proj.weight": ArraySpec((32, 8), np.dtype("f4"), ("heads", "embed"), (2, 8)),
        "model.layers.1.block_sparse_moe.experts.w1.weight": ArraySpec((3, 16, 8), np.dtype("f4"), (None,) * 3),
        "model.norm.weight": ArraySpec((8,), np.dtype("f4"), (None,)),
    }
    rates = Rates(optax.constant_schedule(1.0), optax.constant_schedule(0.1), decay=0.0, clip=1e9)
    params = {name: normal(*spec.shape) for name, spec in specs.items()}
    gradients = {name: normal(*spec.shape) for name, spec in specs.items()}
    gradients["model.layers.0.self_attn.q_proj.weight"] *= jnp.where(jnp.arange(32) < 16, 1.0, 1e-3)[:, None]
    chosen_by = optimiser(specs, rates)
    changes, _ = jax.jit(chosen_by.update)(gradients, chosen_by.init(params), params)
    blocks = [*np.reshape(changes["model.layers.0.self_attn.q_proj.weight"], (2, 16, 8))]
    blocks += [*np.asarray(changes["model.layers.1.block_sparse_moe.experts.w1.weight"])]
    for block in blocks:
        sizes = np.linalg.svd(block, compute_uv=False) / 2**0.5  # sqrt(out / in)
        assert sizes.min() > 0.5 and sizes.max() < 1.4
    np.testing.assert_allclose(np.abs(changes["model.norm.weight"]), 0.1, rtol=1e-3)
    with pytest.raises(TrainingError, match="unheard_of"):
        kind_of("model.layers.0.unheard_of.weight")


def test_the_mask_holds_the_best_and_of_equals_the_first():
    # red when ties are all taken
    scores = jnp.array([[[3.0, -0.0, 0.0, 0.0, -1.0, 2.0], [-jnp.inf] * 5 + [1.0]]])
    assert np.array_equal(chosen(scores, 3)[0], [[1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]])


def test_batches_are_a_function_of_the_step_and_keep_sequences_apart():
    # red when a part is drawn from where the last one ended
    sequences = [(np.arange(n, dtype=np.int32) + 1, np.arange(n) > 1) for n in (5, 9, 17, 30)]
    made = [Packed(from_list(sequences, 3), Buckets((8, 16), 64), 3) for _ in range(2)]
    late = [made[0](step) for step in (200, 3)]
    early = [made[1](step) for step in (3, 200)]
    for a, b in zip(late, reversed(early), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert a.ids.shape[0] * a.ids.shape[1] == 64 and set(a.lengths) <= {4, 8, 16}
        for ids, targets, weights, length in zip(*a, strict=True):
            assert list(targets[:length]) == list(ids[:length] + 1) and not weights[length:].any()
    with pytest.raises(TrainingError, match="up to 4 tokens"):
        Packed(from_list(sequences[2:], 3), Buckets((4,), 64), 3)(0)
