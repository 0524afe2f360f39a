"""bfloat16 runs against the float64 goldens, and what must stay float32 in them (PF-07, PF-19; text-model section 6)."""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_jax.cache import KdaCache, MlaCache
from kimi_jax.model import abstract
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import choose_precision
from tests.parity import trace
from tests.parity.models import TINY, Slots, golden, logits, prompt, tiny

PROMPTS = range(7)
LATENT = {None: ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}
"""What the values of cached rows are rounded to; the array that holds them may be wider."""

AGREED = {
    "A_log",
    "dt_bias",
    "o_norm.weight",
    "e_score_correction_bias",
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
}
"""Parameters that are float32 from load to use."""

latents = pytest.mark.parametrize("kv_dtype", [None, pytest.param("fp8", marks=pytest.mark.slow)])


@cache
def run(kv_dtype: str | None) -> tuple[Slots, np.ndarray]:
    """The rows after all prompts, and the logits of every token."""
    rows = Slots(tiny(dtype="bfloat16", kv_dtype=kv_dtype), len(PROMPTS))
    return rows, np.concatenate(rows.run([prompt(index) for index in PROMPTS], 16))


def cosine(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return (got * expected).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(expected, axis=-1)


@latents
def test_medians_over_all_tokens(kv_dtype):
    # red when a rounding point is added inside a float32 part; a flipped expert moves single tokens, so medians count.
    # The fixture's own bfloat16 run: cosine median 0.9997, 10 % quantile 0.984, minimum 0.87, median error 0.16.
    expected = np.concatenate([logits(index) for index in PROMPTS])
    _, got = run(kv_dtype)
    similar, errors = cosine(got, expected), np.abs(got - expected).max(axis=-1)
    # rows of four significant bits move every token
    least, most = (0.9994, 0.21) if kv_dtype is None else (0.9990, 0.27)
    assert np.median(similar) > least
    assert np.quantile(similar, 0.1) > 0.96
    assert similar.min() > 0.75
    assert np.median(errors) < most
    assert np.mean(got.argmax(-1) == expected.argmax(-1)) > 0.84


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", LATENT)
def test_every_token_with_the_golden_routing(kv_dtype, monkeypatch):
    # red when any rounding is added or lost by a factor of two: without flipped experts every token must be close
    chosen = iter([golden()[f"trace/layer{layer}/topk_idx"] for layer in range(1, 13)])

    def route(scores, bias, top_k, *, renormalize, scale, **_):
        ids = jnp.asarray(next(chosen))
        weights = jnp.take_along_axis(jax.nn.sigmoid(scores), ids, axis=-1)
        return ids, weights / weights.sum(axis=-1, keepdims=True)

    with trace.compiled_ops() as patch:
        patch.setattr(trace.HEAVY["route"][0], "route", route)
        got, hidden, _ = trace.forward(prompt(3), precision=choose_precision("bfloat16", kv_dtype, experts="packed"))
    assert hidden.dtype == ml_dtypes.bfloat16
    assert cosine(got, logits(3)).min() > 0.9997
    assert np.abs(got - logits(3)).max() < 0.2


@latents
def test_states_stay_float32(kv_dtype):
    # red when the state is rounded anywhere, also if it is stored as float32 again (PF-07)
    rows, _ = run(kv_dtype)
    states(rows, rounded=False)
    rows.feed([[5]] * len(PROMPTS), 16)
    states(rows, rounded=False)
    before = rows.of_row(2)
    rows.restart(0, 1)
    for got, kept in zip(rows.of_row(2), before, strict=True):
        np.testing.assert_array_equal(got, kept)
    for entry in rows.cache:
        if isinstance(entry, MlaCache):
            assert fits(np.asarray(entry.latent), LATENT[kv_dtype])
    rows.restart(*PROMPTS)
    states(rows, rounded=True)  # zeros now


def states(rows: Slots, rounded: bool) -> None:
    for entry in rows.cache:
        if isinstance(entry, KdaCache):
            assert (entry.state.dtype, entry.conv.dtype) == (np.float32, ml_dtypes.bfloat16)
            assert fits(np.asarray(entry.state), ml_dtypes.bfloat16) == rounded


def fits(values: np.ndarray, dtype: type) -> bool:
    """Whether a dtype holds all the values."""
    return bool(np.all(values.astype(np.float32) == values.astype(dtype).astype(np.float32)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sensitive_parameters_stay_float32(platform):
    # red when one of them follows the dtype of the dots
    _, specs = abstract(trace.config(), choose_precision("bfloat16", platform=platform), Parallel.single())
    for name, spec in specs.items():
        if any(name.endswith(ending) for ending in AGREED):
            assert spec.dtype == np.float32, name
        elif platform == "gpu" and spec.dtype.itemsize > 1:
            assert spec.dtype == ml_dtypes.bfloat16, name


def test_sensitive_parameters_arrive_bit_for_bit():
    # red when the loader takes them through bfloat16
    stored = {name: array for shard in TINY.glob("*.safetensors") for name, array in load_file(shard).items()}
    found = 0
    for name, array in tiny(dtype="bfloat16").runner.params.items():
        if any(name.endswith(ending) for ending in AGREED):
            expected = stored[f"language_model.{name}"]
            np.testing.assert_array_equal(np.asarray(array), expected[: array.shape[0]])
            found += 1
    assert found == 9 * 6 + 12


def test_distinct_router_biases_stay_distinct():
    # red when the correction bias meets the scores in bfloat16: about 9 of these survive there (PF-19)
    bias = jnp.linspace(6.817, 7.063, 238, dtype=jnp.float32)
    ids, _ = trace.SHIPPED["route"](jnp.zeros((1, 238)), bias, 238, renormalize=True, scale=1.0)
    assert ids[0].tolist() == list(range(237, -1, -1))
