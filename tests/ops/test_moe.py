from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file

from kimi_jax.ops.moe import api, reference, weights
from kimi_jax.ops.moe.weights import ExpertCodes, ExpertWeights

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9}


class Case(NamedTuple):
    """Inputs of one call, as numpy arrays; `experts` is the count over the whole model."""

    z: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    w: ExpertWeights
    experts: int


def make(seed: int, *, tokens: int, top_k: int, experts: int, latent: int, ffn: int, dtype: str = "float32") -> Case:
    random = np.random.default_rng(seed)

    def matrix(out, inner):
        scale = 127 + round(np.log2(0.5 / inner**0.5)) + random.integers(-2, 3, (experts, out, inner // 32))
        return random.integers(0, 256, (experts, out, inner // 2), np.uint8), scale.astype(np.uint8)

    z = random.normal(size=(tokens, latent)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = random.random((tokens, top_k), np.float32)
    w = ExpertWeights(*matrix(ffn, latent), *matrix(ffn, latent), *matrix(latent, ffn))
    return Case(z, ids, weights, w, experts)


def standard(tokens: int, dtype: str = "float32") -> Case:
    """The case of most tests, so that its few shapes are compiled once."""
    return make(tokens, tokens=tokens, top_k=3, experts=10, latent=96, ffn=64, dtype=dtype)


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    values = np.stack([CODES[packed % 16], CODES[packed // 16]], axis=-1).reshape(*packed.shape[:-1], -1)
    return values * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=-1)


def oracle(case: Case, first: int = 0, linear_beta: float | None = 25.0) -> np.ndarray:
    """Every token through every one of its experts in float64, rounded where text-model section 6 says."""
    w1, w3, w2 = (decode(*case.w[place : place + 2]) for place in (0, 2, 4))
    held = range(first, first + len(w1))
    out = np.zeros(case.z.shape)
    for token, place in np.ndindex(case.ids.shape):
        if case.ids[token, place] in held:
            expert = case.ids[token, place] - first
            a, b = (w[expert] @ case.z[token].astype(np.float64) for w in (w1, w3))
            linear = b if linear_beta is None else linear_beta * np.tanh(b / linear_beta)
            hidden = 4 * np.tanh(a / 4) / (1 + np.exp(-a)) * linear
            one = (w2[expert] @ hidden.astype(case.z.dtype).astype(np.float64)).astype(case.z.dtype)
            out[token] += np.float64(case.weights[token, place]) * one.astype(np.float64)
    return out


class ExpertsContract:
    """What every implementation of experts must do. Subclasses set `experts` (with beta 4) and `form`."""

    tolerance = 3e-6
    """Of float32, relative to the largest output: sums of at most 96 products, in another order than float64's."""

    sizes = (1, 7, 20, 70)
    """Tokens; kernels have a form for few and one for many, and tiles of 16 and of 64 rows."""

    def run(self, case: Case, first: int = 0, linear_beta: float | None = 25.0) -> np.ndarray:
        w = self.form(case.w)
        out = self.experts(*map(jnp.asarray, case[:3]), w, first_expert=jnp.int32(first), linear_beta=linear_beta)
        assert out.dtype == jnp.float32
        return np.asarray(out)

    def assert_right(self, case: Case, first: int = 0, linear_beta: float | None = 25.0) -> None:
        expected = oracle(case, first, linear_beta)
        got = self.run(case, first, linear_beta)
        np.testing.assert_allclose(got, expected, rtol=0, atol=self.tolerance * max(1.0, np.abs(expected).max()))

    def form(self, w: ExpertWeights) -> ExpertWeights | ExpertCodes:
        return ExpertWeights(*map(jnp.asarray, w))

    def test_against_every_expert_in_float64(self):
        # red when w1 and w3 are swapped, planes are swapped, or a scale belongs to the neighbouring group
        for tokens in self.sizes:
            self.assert_right(standard(tokens))

    @settings(max_examples=12, suppress_health_check=[HealthCheck.differing_executors])  # every subclass runs it
    @given(st.data())
    def test_any_choice_of_experts(self, data):
        # a rank that holds 10 experts of 15 from `first` on; up to all tokens are padding
        case = standard(data.draw(st.sampled_from(self.sizes)))
        random = np.random.default_rng(data.draw(st.integers(0, 9)))
        crowd = data.draw(st.sampled_from([3, 5, 15]))
        ids = np.stack([random.permutation(crowd)[:3] for _ in case.z]).astype(np.int32)
        ids[len(ids) - data.draw(st.integers(0, len(ids))) :] = 15
        # red when an id is clipped instead of skipped, or an expert of more rows than a tile loses some
        self.assert_right(case._replace(ids=ids), data.draw(st.integers(0, 5)))

    @pytest.mark.parametrize("tokens", [20, 70])
    def test_one_expert_takes_all_tokens(self, tokens):
        case = standard(tokens)
        case.ids[:] = [4, 10, 11]
        self.assert_right(case)  # red when only one tile of an expert runs

    def test_every_expert_for_every_token(self):
        self.assert_right(make(0, tokens=5, top_k=6, experts=6, latent=64, ffn=32))

    def test_no_expert_at_all(self):
        for tokens in (7, 70):
            case = standard(tokens)
            assert not self.run(case._replace(ids=np.full_like(case.ids, 10))).any()

    @pytest.mark.parametrize("tokens", [7, 70])
    def test_padding_may_hold_nan_and_changes_nothing(self, tokens):
        case = standard(tokens)
        case.ids[-1], case.ids[0] = 10, 10
        clean = self.run(case)
        for array in (case.z, case.weights):
            array[-1] = array[0] = np.nan
        poisoned = self.run(case)
        np.testing.assert_array_equal(poisoned, clean)  # red when rows are masked by a product with 0
        assert not poisoned[[0, -1]].any()

    @pytest.mark.parametrize("tokens", [7, 70])
    def test_untouched_experts_are_not_read(self, tokens):  # red with a dense sum over all experts
        case = standard(tokens)
        case.ids[:] = [0, 1, 5]
        clean = self.run(case)
        for scale in case.w[1::2]:
            scale[6:] = 255  # NaN
        np.testing.assert_array_equal(self.run(case), clean)

    @pytest.mark.parametrize("tokens", [1, 7, 70])
    def test_identical_calls_are_bitwise_identical(self, tokens):
        case = standard(tokens)
        np.testing.assert_array_equal(self.run(case), self.run(case))

    def test_rows_do_not_depend_on_their_order(self):
        case = standard(7)
        back = case._replace(z=case.z[::-1].copy(), ids=case.ids[::-1].copy(), weights=case.weights[::-1].copy())
        np.testing.assert_array_equal(self.run(back)[::-1], self.run(case))  # red when a pair goes to the wrong token

    @pytest.mark.parametrize("tokens", [7, 70])
    def test_bfloat16_rounds_the_activation_and_each_expert(self, tokens):
        case = standard(tokens, dtype="bfloat16")
        expected = oracle(case)
        error = np.abs(self.run(case) - expected) / np.abs(expected).max()
        # equal but where float32 and float64 sums round apart; red (median 1e-3) without one of the roundings
        assert np.median(error) < 1e-6
        assert error.max() < 8 * EPSILON["bfloat16"]

    def test_a_linear_half_without_bound(self):
        self.assert_right(standard(7), linear_beta=None)  # red when None counts as some bound

    def test_extreme_scales_saturate_the_activation(self):
        case = standard(7)
        case.w.w1_scale[:] = 244
        with np.errstate(over="ignore"):  # of exp in the oracle, towards a sigmoid of 0
            self.assert_right(case)  # red when 0 times an overflowed scale makes NaN

    def test_golden_layers(self, k3_tiny, k3_golden):
        tensors = {}
        for shard in sorted(k3_tiny.glob("*.safetensors")):
            tensors |= load_file(shard)
        for layer in range(1, 13):
            stored = golden_layer(tensors, k3_golden, layer)
            got = self.run(stored)
            expected = k3_golden[f"trace/layer{layer}/latent_sum"]
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())

    def test_shapes_that_do_not_fit_are_all_named(self):
        case = make(0, tokens=2, top_k=1, experts=3, latent=64, ffn=32)
        w = self.form(case.w)
        broken = w._replace(w1_scale=w.w1_scale[:, :, :1], w2_scale=w.w2_scale[:2])
        with pytest.raises(
            ValueError, match=r"w1_scale is \(3, 32, 1\), expected \(3, 32, 2\).*w2_scale is \(2, 64, 1\)"
        ):
            self.experts(*map(jnp.asarray, case[:3]), broken, first_expert=0)

    def test_ranks_that_hold_a_part_each_add_up(self):
        case = make(8, tokens=20, top_k=3, experts=12, latent=32, ffn=64)
        mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        split, whole = PartitionSpec("expert"), PartitionSpec()

        @partial(jax.shard_map, mesh=mesh, in_specs=(whole, whole, whole, split), out_specs=whole, check_vma=False)
        def ranks(z, ids, weights, w):
            first = jax.lax.axis_index("expert") * w[0].shape[0]
            return jax.lax.psum(self.experts(z, ids, weights, w, first_expert=first), "expert")

        got = jax.jit(ranks)(*map(jnp.asarray, case[:3]), self.form(case.w))
        np.testing.assert_allclose(got, oracle(case), rtol=0, atol=self.tolerance * 10)


class ReferenceContract(ExpertsContract):
    """What the form for XLA does besides: its tiles, its blocks, its memory."""

    # one entry per trip count of the loops: single rows, tiles, a tail tile, several tiles of one expert
    sizes = (1, 2, 7, 64, 500)

    @pytest.mark.parametrize("tokens", [1, 40])
    def test_matrices_larger_than_a_block(self, tokens):
        case = make(tokens, tokens=tokens, top_k=2, experts=4, latent=256, ffn=512)
        assert (weights.block_rows(512, 256), weights.block_rows(256, 512)) == (256, 128)
        self.assert_right(case)  # red when every block reads the first rows, or writes over them

    def test_padded_columns_of_a_shard_change_nothing(self):
        case = make(6, tokens=5, top_k=2, experts=4, latent=64, ffn=32)
        # a rank whose 32 inner columns are padded to 64: codes 0, scale bytes 127
        rows, columns, groups = ((0, 0), (0, 32), (0, 0)), ((0, 0), (0, 0), (0, 16)), ((0, 0), (0, 0), (0, 1))
        fill = partial(np.pad, constant_values=127)
        w = case.w
        padded = (
            *(np.pad(w.w1_packed, rows), fill(w.w1_scale, rows), np.pad(w.w3_packed, rows), fill(w.w3_scale, rows)),
            *(np.pad(w.w2_packed, columns), fill(w.w2_scale, groups)),
        )
        np.testing.assert_allclose(self.run(case._replace(w=ExpertWeights(*padded))), self.run(case), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("tokens", [1, 8, 96])
    def test_memory_does_not_grow_with_the_number_of_experts(self, tokens):
        temp = []
        for experts in (8, 64):
            case = make(0, tokens=tokens, top_k=4, experts=experts, latent=64, ffn=96)
            args = (*map(jnp.asarray, case[:3]), self.form(case.w))
            temp.append(
                jax.jit(partial(self.experts, first_expert=0))
                .lower(*args)
                .compile()
                .memory_analysis()
                .temp_size_in_bytes
            )
        one_expert = 3 * 64 * 96 * 4
        assert temp[1] < temp[0] + 2 * one_expert  # red when decoding is moved out of the loop, over all experts

    @pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
    def test_lowers_for_accelerators(self, platform):
        case = make(0, tokens=4, top_k=2, experts=4, latent=32, ffn=64, dtype="bfloat16")
        args = (*map(jnp.asarray, case[:3]), self.form(case.w))
        jax.jit(partial(self.experts, first_expert=0)).trace(*args).lower(lowering_platforms=(platform,))


def golden_layer(tensors: dict, golden: dict, layer: int) -> Case:
    """The experts' inputs in one layer of the traced prompt, up to the latent in float64."""
    prefix = f"language_model.model.layers.{layer}."
    moe = prefix + "block_sparse_moe."
    x = golden[f"trace/layer{layer}/mlp_in"].astype(np.float64)
    x = (
        x
        / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        * tensors[prefix + "post_attention_layernorm.weight"].astype(np.float64)
    )
    z = x @ tensors[moe + "routed_expert_down_proj.weight"].astype(np.float64).T
    parts = [
        np.stack([tensors[f"{moe}experts.{expert}.{name}.weight_{part}"] for expert in range(16)])
        for name in ("w1", "w3", "w2")
        for part in ("packed", "scale")
    ]
    ids, weights = (golden[f"trace/layer{layer}/topk_{part}"] for part in ("idx", "w"))
    return Case(z.astype(np.float32), ids, weights, ExpertWeights(*parts), 16)


@cache
def compiled(impl: str):
    return jax.jit(partial(api.experts, beta=4.0, impl=impl), static_argnames="linear_beta")


class TestReferencePacked(ReferenceContract):
    def experts(self, *args, linear_beta=25.0, **options):
        return compiled("reference")(*args, linear_beta=linear_beta, **options)


class TestInterpret(ExpertsContract):
    def experts(self, *args, linear_beta=25.0, **options):
        return compiled("interpret")(*args, linear_beta=linear_beta, **options)


class TestReferenceCodes(ReferenceContract):
    def experts(self, *args, linear_beta=25.0, **options):
        return compiled("reference")(*args, linear_beta=linear_beta, **options)

    def form(self, w):
        return api.unpack(super().form(w))

    def test_bytes(self):
        w = make(0, tokens=1, top_k=1, experts=2, latent=64, ffn=32).w
        values = 2 * 3 * 64 * 32
        assert sum(array.nbytes for array in w) * 32 == 17 * values
        assert sum(array.nbytes for array in self.form(w)) * 32 == 33 * values


class TestTiling:
    def test_pairs_are_sorted_by_expert_then_by_token(self):
        ids = jnp.array([[5, 2], [2, 9], [3, 5], [9, 9]])
        expert, pair = reference.sort_pairs(ids, 2, 4, rows=2)
        assert expert.tolist() == [
            0,
            0,
            1,
            3,
            3,
            4,
            4,
            4,
            4,
            4,
        ]  # local ids of 2, 2, 3, 5, 5; then skipped ones and the tail
        assert pair.tolist()[:5] == [1, 2, 4, 0, 5]

    @pytest.mark.parametrize(
        ("pairs", "local", "rows"),
        [(8, 64, 1), (64, 64, 1), (256, 64, 1), (320, 64, 8), (4096, 128, 32), (9999, 64, 64)],
    )
    def test_tile_rows(self, pairs, local, rows):
        assert reference.tile_rows(pairs, local) == rows

    def test_too_many_pairs_for_the_sort_key_are_refused(self):
        ids = jax.ShapeDtypeStruct((1 << 20, 16), jnp.int32)
        with pytest.raises(ValueError, match=r"16777216 .* pairs over 896 experts are too many"):
            jax.eval_shape(lambda ids: reference.sort_pairs(ids, 0, 896, 64), ids)
