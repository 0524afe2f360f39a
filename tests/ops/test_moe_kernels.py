"""What is particular to the kernels: their products, their groups, what they refuse. What they compute: test_moe."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from kimi_jax.ops.moe import api, grouped, kernels, reference
from kimi_jax.ops.moe.products import decode_tile, product_of, round_to_fp8
from kimi_jax.ops.moe.weights import ExpertWeights
from kimi_jax.quant import mxfp4
from tests.ops.test_moe import compiled, make, oracle, standard

MI355X = AbstractMesh(
    (1,),
    ("tensor",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="gfx950", num_cores=256, platform="rocm"),
)


def run(case, **options):
    w = ExpertWeights(*map(jnp.asarray, case.w))
    call = jax.jit(partial(api.experts, beta=4.0, linear_beta=25.0, impl="interpret", **options))
    return np.asarray(call(*map(jnp.asarray, case[:3]), w, first_expert=jnp.int32(0)))


class TestProducts:
    def test_every_byte_is_decoded_as_it_is_stored(self):
        # Red when a nibble, a sign, a code or a scale bit moves. 16 columns of all bytes, scales that stay finite.
        packed = jnp.arange(256, dtype=jnp.uint8).reshape(1, 256) + jnp.zeros((16, 1), jnp.uint8)
        scale = jnp.asarray(np.linspace(2, 250, 16 * 16).astype(np.uint8).reshape(16, 16))
        np.testing.assert_array_equal(jax.jit(decode_tile)(packed, scale), mxfp4.decode(packed, scale))

    def test_rounding_to_fp8_loses_half_a_unit_of_the_fourth_bit(self):
        x = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32) * 2.0 ** np.arange(-8, 8)[:, None]
        codes, scale = jax.jit(round_to_fp8)(x)
        assert codes.dtype == ml_dtypes.float8_e4m3fn
        unit = np.repeat(2.0 ** (np.asarray(scale, int) - 127), 32, axis=1)
        error = np.abs(np.asarray(codes, np.float64) * unit - x)
        # Red when the largest of a group saturates, or half of the range lies idle.
        assert (error <= np.maximum(np.abs(x) / 16, unit * 2.0**-10)).all()
        largest = np.abs(np.asarray(codes, np.float64)).reshape(16, 4, 32).max(-1)
        assert (largest > 223).all()
        assert np.sqrt((error**2).mean(1) / (x**2).mean(1)).max() < 0.032

    def test_zero_rows_stay_zero_in_fp8(self):
        codes, scale = round_to_fp8(jnp.zeros((1, 32)))
        assert not np.asarray(codes, np.float32).any()
        assert scale.tolist() == [[1]]

    @pytest.mark.parametrize(("product", "bound"), [("decoded", 2e-3), ("scaled", 2e-3), ("fp8", 0.06)])
    def test_accuracy_of_the_three_ways(self, product, bound):
        case = make(0, tokens=7, top_k=3, experts=4, latent=256, ffn=128, dtype="bfloat16")
        expected = oracle(case)
        error = run(case, product=product) - expected
        # bfloat16 rows: flipped roundings only. fp8: 3% of each activation, once up and once down
        assert np.linalg.norm(error) < bound * np.linalg.norm(expected)

    def test_a_product_of_the_reference_cannot_be_chosen(self):
        case = standard(7)
        with pytest.raises(ValueError, match="'fp8' is for kernels"):
            api.experts(*map(jnp.asarray, case[:3]), ExpertWeights(*case.w), beta=4.0, linear_beta=25.0, product="fp8")


class TestGroups:
    @pytest.mark.parametrize(("tokens", "scan"), [(1, 2048), (70, 64), (70, 2048)])
    def test_pairs_are_grouped_as_the_reference_sorts_them(self, tokens, scan, monkeypatch):
        # Red when a step forgets the rows of the steps before, or a pair of another device counts.
        monkeypatch.setattr(grouped, "SCAN", scan)
        ids = jnp.asarray(standard(tokens).ids)
        starts, stops, pairs = grouped.group(ids, jnp.array([2], jnp.int32), 5, interpret=True)
        expert, pair = reference.sort_pairs(ids, 2, 5, rows=0)
        held = int((expert < 5).sum())
        assert held
        np.testing.assert_array_equal(pairs[:held], pair[:held])
        np.testing.assert_array_equal(starts, np.searchsorted(expert, np.arange(5)))
        np.testing.assert_array_equal(stops, np.searchsorted(expert, np.arange(5), side="right"))

    def test_low_tiles(self, monkeypatch):
        # Red when a tile's height is not the step from tile to tile: experts meet about 27 of these rows. High tiles: test_moe.
        case, asked = make(3, tokens=40, top_k=2, experts=3, latent=64, ffn=32), []
        monkeypatch.setattr(grouped, "tile_rows", lambda *sizes: asked.append(sizes) or grouped.FEW_ROWS)
        z, ids, weights = map(jnp.asarray, case[:3])
        options = {"beta": 4.0, "linear_beta": 25.0, "way": product_of(z.dtype), "interpret": True}
        first, w = jnp.zeros(1, jnp.int32), ExpertWeights(*map(jnp.asarray, case.w))
        got = jax.jit(partial(grouped.experts, **options))(z, ids, weights, w, first)
        np.testing.assert_allclose(got, oracle(case), rtol=0, atol=5e-6 * np.abs(oracle(case)).max())
        assert asked == [(case.ids.size, case.w[0].shape[0])]

    def test_a_tile_is_as_high_as_an_expert_meets_rows(self):
        # Red when short chunks meet tiles that are mostly empty, or long ones read an expert three times.
        tall = [
            tokens for tokens in (65, 128, 512, 896, 897, 2048) if grouped.tile_rows(tokens * 16, 896) == grouped.ROWS
        ]
        assert tall == [897, 2048]


@pytest.mark.parametrize("rows", [1, 7])
def test_a_row_does_not_depend_on_its_batch(rows):
    # PF-20. Red when the sum over experts follows the order of the batch.
    case = standard(20)
    some = case._replace(z=case.z[:rows], ids=case.ids[:rows], weights=case.weights[:rows])
    call = partial(compiled("interpret"), linear_beta=25.0)
    w = ExpertWeights(*map(jnp.asarray, case.w))
    whole, part = (call(*map(jnp.asarray, c[:3]), w, first_expert=jnp.int32(0)) for c in (case, some))
    np.testing.assert_array_equal(part, whole[:rows])


def test_codes_are_refused():
    case = standard(7)
    w = api.unpack(ExpertWeights(*map(jnp.asarray, case.w)))
    with pytest.raises(ValueError, match='experts="packed"'):
        api.experts(*map(jnp.asarray, case[:3]), w, beta=4.0, linear_beta=25.0, impl="pallas")


def test_arrays_whose_offsets_would_overflow_are_all_named():
    # Red when 32-bit offsets of one-byte elements are trusted: 896 experts of 1,536 columns, a cut in two.
    byte = partial(jax.ShapeDtypeStruct, dtype=jnp.uint8)
    w = ExpertWeights(
        *(byte((896, 1536, width)) for _ in "13" for width in (1792, 112)),
        byte((896, 3584, 768)),
        byte((896, 3584, 48)),
    )
    rows = [
        jax.ShapeDtypeStruct(*of) for of in (((1, 3584), jnp.bfloat16), ((1, 16), jnp.int32), ((1, 16), jnp.float32))
    ]
    with pytest.raises(ValueError, match=r"w1_packed .* has 2466250752.*w3_packed.*w2_packed"):
        jax.eval_shape(partial(api.experts, beta=4.0, linear_beta=25.0, impl="pallas"), *rows, w)


@pytest.mark.parametrize("tokens", [1, kernels.FEW_TOKENS, kernels.FEW_TOKENS + 1])
def test_kernels_lower_without_a_gpu(tokens):
    # Red when a kernel uses what the Triton backend lacks; and when the choice between the two forms moves.
    case = make(0, tokens=tokens, top_k=2, experts=4, latent=64, ffn=96, dtype="bfloat16")
    args = (*map(jnp.asarray, case[:3]), ExpertWeights(*map(jnp.asarray, case.w)))
    call = jax.jit(partial(api.experts, beta=4.0, linear_beta=None, impl="pallas"))
    with use_abstract_mesh(MI355X):
        text = str(call.trace(*args).lower(lowering_platforms=("rocm",)).compiler_ir("stablehlo"))
    assert text.count("dot_scaled") > 0
    assert ("moe_group" in text) == (tokens > kernels.FEW_TOKENS)


def asked_of(seed: int, tokens: int, dtype: str) -> tuple[api.Asked, jax.Array, jax.Array]:
    """Logits over 15 experts with many equal scores and experts that most tokens want, latents, biases, real tokens."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=(tokens, 15)) + random.normal(size=15), 1).astype(np.float32)
    latent = jnp.asarray(random.normal(size=(tokens, 96)), dtype)
    bias = jnp.asarray(np.round(random.normal(size=15) / 4, 1), jnp.float32)
    return api.Asked(jnp.asarray(logits), latent), bias, jnp.arange(tokens) < max(1, tokens - 2)


def as_sent(asked: api.Asked) -> api.Sent:
    """The same as three devices would send it."""
    logits = np.asarray(asked.logits).view(np.uint16).reshape(-1, 3, 10)
    latent = np.asarray(asked.latent).view(np.uint16).reshape(-1, 3, 32)
    return api.Sent(jnp.asarray(np.concatenate([logits, latent], axis=-1).swapaxes(0, 1)), 5, 32)


ROUTING = {"top_k": 3, "renormalize": True, "scale": 2.5, "beta": 4.0, "linear_beta": 25.0}


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), (5, "bfloat16"), (8, "float32")])
def test_a_launch_that_also_routes(tokens, dtype):
    # red when a tie goes to the higher id, a place is counted from another token, padding leads, or halves are swapped
    w = ExpertWeights(*map(jnp.asarray, standard(7).w))
    run, plain = (jax.jit(partial(api.routed_experts, **ROUTING, impl=impl)) for impl in ("interpret", "reference"))
    for seed in range(6):
        asked, bias, real = asked_of(seed, tokens, dtype)
        rows = np.asarray(real)
        expected = np.asarray(plain(asked, bias, real, w, first_expert=jnp.int32(2)))[rows]
        for given in (asked, as_sent(asked)) if dtype == "bfloat16" else (asked,):
            got = np.asarray(run(given, bias, real, w, first_expert=jnp.int32(2)))[rows]
            bound = (3e-6 if dtype == "float32" else 2.0**-7) * np.abs(expected).max(initial=1)
            np.testing.assert_allclose(got, expected, rtol=0, atol=bound)


def test_what_was_sent_is_taken_apart_whole():
    asked, *_ = asked_of(0, 5, "bfloat16")
    for got, expected in zip(jax.jit(api.Sent.whole)(as_sent(asked)), asked, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_more_tokens_route_in_a_launch_of_their_own():
    assert [api.routes_itself(tokens, "pallas") for tokens in (1, 8, 9)] == [True, True, False]
    assert not api.routes_itself(1, "reference")
