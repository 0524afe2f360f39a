"""Everything of a KDA sub-layer between its projections, in XLA and by its kernels: one contract for both."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.kda import api, pallas_chunk
from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.problems import ProblemsError
from tests.ops.test_kda import LOG_DECAYS, golden_case, near
from tests.ops.test_kda import Case as KdaCase
from tests.ops.test_kda import oracle as kda_oracle
from tests.ops.test_short_conv import oracle as conv_oracle
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

EPS = 1e-5
STEP, PREFILL = 4, 2 * pallas_chunk.CHUNK + 3
"""Tokens of a call that is one launch, and of one in chunks; few sizes, and so few compiled programs."""
ROWS, HEADS, DIM = 3, 2, 16
GOLDEN = ("wide", "max_decay", "mixed_decay", "beta_one", "same_key", "steep_gate")


class Case(NamedTuple):
    """Inputs of one call, as numpy arrays."""

    projected: Projected
    weights: Weights
    windows: np.ndarray
    state: np.ndarray
    lengths: np.ndarray

    def tokens(self, start: int, stop: int, width: int, windows: np.ndarray, state: np.ndarray) -> "Case":
        """These tokens of every row after what was held, padded to ``width`` with what must not matter."""

        def cut(x: np.ndarray) -> np.ndarray:
            pad = [(0, 0), (0, width - stop + start), (0, 0)]
            return np.pad(x[:, start:stop], pad, constant_values=np.nan)

        lengths = np.clip(self.lengths - start, 0, stop - start)
        return Case(Projected(*map(cut, self.projected)), self.weights, windows, state, lengths)


def make(seed, *, tokens=PREFILL, log_decay=None, lengths=None, taps=4, rank=DIM, size=2.0) -> Case:
    random = np.random.default_rng(seed)
    channels = HEADS * DIM

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    A_log, dt_bias = normal(HEADS), normal(HEADS, DIM)
    decay, latent = normal(channels, rank), normal(ROWS, tokens, rank)
    if log_decay is not None:  # the same decay in every channel of every token, up to what the latent adds
        ratio = np.clip(log_decay / -5, 1e-6, 1 - 1e-6)
        dt_bias = (np.log(ratio / (1 - ratio)) / np.exp(A_log)[:, None] + 0 * dt_bias).astype(np.float32)
        latent *= 1e-3
    return Case(
        Projected(
            *(normal(ROWS, tokens, channels) * np.float32(size) for _ in range(4)),
            latent,
            normal(ROWS, tokens, HEADS) * 2,
        ),
        Weights(*(normal(channels, 1, taps) for _ in range(3)), decay, A_log, dt_bias, normal(DIM)),
        normal(ROWS, 3, taps - 1, channels) * np.float32(size),
        normal(ROWS, HEADS, DIM, DIM),
        np.full(ROWS, tokens, np.int32) if lengths is None else np.int32(lengths),
    )


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts' own oracles in float64, one after another."""
    x, w = case.projected, case.weights
    convolved = [
        conv_oracle(y, case.windows[:, stream], taps, case.lengths)
        for stream, (y, taps) in enumerate(zip(x[:3], w[:3], strict=True))
    ]
    by_head = (*x.v.shape[:2], HEADS, -1)
    q, k, v = (out.reshape(by_head) for out, _ in convolved)
    f = np.where(np.arange(x.v.shape[1])[:, None] < case.lengths[:, None, None], np.float64(x.latent), 0) @ w.decay.T
    out, state = kda_oracle(KdaCase(q, k, v, f.reshape(by_head), x.b, w.A_log, w.dt_bias, case.state, case.lengths))
    scaled = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + EPS) * w.norm
    gated = scaled / (1 + np.exp(-np.float64(x.gate).reshape(by_head)))
    real = np.arange(x.v.shape[1]) < case.lengths[:, None]
    gated = np.where(real[..., None], gated.reshape(x.v.shape), 0)
    return gated, np.stack([window for _, window in convolved], axis=1), state


@cache
def compiled(impl: str, eps: float = EPS, lower_bound: float = -5.0):
    return jax.jit(partial(api.attend, lower_bound=lower_bound, eps=eps, impl=impl))


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


every_subclass = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=10)
sizes = st.sampled_from((2.0, 1e-3))  # of projections: beside the small ones the eps of the unit length counts
every_size = pytest.mark.parametrize("tokens", (1, STEP, PREFILL))


def lengths_near_edges(tokens: int):
    """Of a row: anything, but mostly idle, one token, full, or around a chunk's edge."""
    edges = {0, 1, 2, 3, tokens - 1, tokens, *range(pallas_chunk.CHUNK - 1, pallas_chunk.CHUNK + 2)}
    return st.one_of(st.sampled_from(sorted(x for x in edges if 0 <= x <= tokens)), st.integers(0, tokens))


class AttendContract:
    """What every implementation of attend must do. Subclasses set `impl`."""

    impl: str

    def run(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out, windows, state = (np.asarray(x) for x in compiled(self.impl)(*case))
        assert (out.dtype, windows.dtype, state.dtype) == (case.projected.v.dtype, case.windows.dtype, np.float32)
        return out, windows, state

    @every_size
    @every_subclass
    @given(seed=st.integers(0, 2**32 - 1), log_decay=st.sampled_from(LOG_DECAYS), size=sizes, data=st.data())
    def test_ragged_rows(self, tokens, seed, log_decay, size, data):
        # red when the window shifts by the padded length, a padded token decays or writes, or a program's head is another's
        lengths = data.draw(st.lists(lengths_near_edges(tokens), min_size=ROWS, max_size=ROWS))
        case = make(seed, tokens=tokens, log_decay=log_decay, lengths=lengths, size=size)
        out, windows, state = self.run(case)
        expected = oracle(case)
        np.testing.assert_allclose(out, expected[0], rtol=0, atol=3e-5 * max(np.abs(expected[0]).max(), 1e-3))
        assert same_bits(windows, expected[1].astype(np.float32))
        near((out * 0, state), (out * 0, expected[2]))
        for row, length in enumerate(lengths):
            assert not out[row, length:].any()
            assert length or same_bits(state[row], case.state[row])

    @every_size
    def test_padding_never_matters(self, tokens):
        # red when padding is multiplied by zero, or an idle row's state is loaded and stored through arithmetic (PF-03)
        case = make(1, tokens=tokens, lengths=[0, 1, max(tokens // 2, 1)])
        case.state[0].flat[:3] = case.windows[0].flat[:3] = -0.0, np.nan, 1e-40
        padded = (np.arange(tokens) >= case.lengths[:, None])[..., None]
        clean = self.run(case)
        for junk in (1e4, np.nan, np.inf):
            dirty = (np.where(padded, np.float32(junk), x) for x in case.projected)
            again = self.run(case._replace(projected=Projected(*dirty)))
            assert all(map(same_bits, clean, again))
        out, windows, state = clean
        assert same_bits(windows[0], case.windows[0]) and same_bits(state[0], case.state[0])
        assert np.isfinite(out).all() and not out[np.broadcast_to(padded, out.shape)].any()

    @every_subclass
    @given(seed=st.integers(0, 2**32 - 1), log_decay=st.sampled_from(LOG_DECAYS), cut=st.integers(0, 20))
    def test_prefill_then_steps(self, seed, log_decay, cut):
        # red when the two paths disagree on the state's axes (PF-04), or on what the window holds (PF-06)
        case = make(seed, log_decay=log_decay, lengths=[cut + 10, cut + 5, cut])
        whole = self.run(case)
        out, windows, state = self.run(case.tokens(0, cut, PREFILL, case.windows, case.state))
        parts = [out[:, :cut]]
        for start in range(cut, cut + 12, STEP):
            out, windows, state = self.run(case.tokens(start, start + STEP, STEP, windows, state))
            parts.append(out)
        joined = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(joined, whole[0][:, : cut + 12], rtol=0, atol=3e-5 * np.abs(whole[0]).max())
        assert same_bits(windows, whole[1])
        near((joined * 0, state), (joined * 0, whole[2]))

    @pytest.mark.parametrize("tokens", (STEP, PREFILL))
    def test_bfloat16_is_rounded_where_the_parts_round(self, tokens):
        # red when a result is not rounded, or the state or a weight is
        case = narrow(make(2, tokens=tokens))
        out, windows, state = (np.float32(x) for x in self.run(case))
        expected = tuple(np.float32(x) for x in compiled("reference")(*case))
        assert np.mean(out == expected[0]) > 0.97
        np.testing.assert_allclose(out, expected[0], rtol=2**-6, atol=1e-3)
        assert same_bits(windows, expected[1])
        near((out * 0, state), (out * 0, expected[2]), BFLOAT16_STATE if tokens == PREFILL else 1e-6)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden(self, k3_golden, name):
        # red with: decay after the update, read before it, eps outside the root, slope outside the sigmoid
        given, expected, state = golden_case(k3_golden, name)
        case, scale = through(given)
        count = min(case.projected.v.shape[1], 6 * STEP)
        parts, windows, held = [], case.windows, case.state
        for start in range(0, count, STEP):
            stop = min(start + STEP, count)
            call = compiled(self.impl, LINEAR, given.lower_bound)
            out, windows, held = call(*case.tokens(start, stop, STEP, windows, held))
            parts.append(np.asarray(out)[:, : stop - start])
        got = np.concatenate(parts, axis=1).reshape(1, count, *expected.shape[2:]) / scale
        state = state if count == expected.shape[1] else kda_oracle(given.tokens(0, count, count, given.state))[1]
        near((got, held / scale), (expected[:, :count], state), 2e-5)

    def test_other_sizes(self):
        # red when the filter's width is taken for 4, or float32 latents are rounded to the dtype of stored weights
        case = make(3, tokens=STEP, taps=3, rank=32, lengths=[0, 2, 4])
        case = case._replace(weights=case.weights._replace(decay=case.weights.decay.astype(jnp.bfloat16)))
        for got, expected in zip(self.run(case), oracle(case), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def narrow(case: Case) -> Case:
    """With bfloat16 activations and dot operands."""
    small = partial(jnp.asarray, dtype=jnp.bfloat16)
    weights = case.weights._replace(decay=small(case.weights.decay))
    return case._replace(projected=Projected(*map(small, case.projected)), weights=weights, windows=small(case.windows))


def through(case: KdaCase) -> tuple[Case, float]:
    """A call of attend that does what this call of kda does, and the factor of its values, state and output.

    The last tap is 1 and inputs are what SiLU brings to the wanted values, small enough for it to reach them; the latent
    holds every gate logit; an eps of ``LINEAR`` and a weight of its root make the norm a factor of 1, the gate is open.
    """
    rows, tokens, heads, dim = case.q.shape
    channels = heads * dim
    flat = (rows, tokens, channels)

    def small(x: np.ndarray) -> np.ndarray:  # only the direction counts, but for vectors beside which eps does
        return x * (0.25 / np.maximum(0.25, np.abs(x).max(axis=-1, keepdims=True)))

    factor = 0.25 / max(0.25, np.abs(case.v).max())
    streams = (before_silu(x.reshape(flat)) for x in (small(case.q), small(case.k), case.v * factor))
    filters = (np.float32([[0, 0, 0, 1]]) * np.ones((channels, 1, 1), np.float32) for _ in range(3))
    projected = Projected(*streams, np.full(flat, 40, np.float32), case.f.reshape(flat), case.b)
    norm = np.full(dim, LINEAR**0.5, np.float32)
    weights = Weights(*filters, np.eye(channels, dtype=np.float32), case.A_log, case.dt_bias, norm)
    windows = np.zeros((rows, 3, 3, channels), np.float32)
    return Case(projected, weights, windows, np.float32(case.state * factor), case.lengths), factor


def before_silu(y: np.ndarray) -> np.ndarray:
    """x with x * sigmoid(x) = y, by Newton's method in float64."""
    x = 2 * np.float64(y)
    for _ in range(40):
        gate = 1 / (1 + np.exp(-x))
        x -= (x * gate - y) / (gate * (1 + x * (1 - gate)))
    return np.float32(x)


LINEAR = 1e12
"""An eps beside which outputs do not count."""

BFLOAT16_STATE = 1e-4
"""Of the largest entry: what splitting operands in two bfloat16 may cost the state of a prefill."""


class TestReference(AttendContract):
    impl = "reference"


class TestKernels(AttendContract):
    impl = "interpret"


def test_kernels_say_what_they_cannot_run():
    # red when an unsupported head is padded or run in silence
    assert api.kernel_problems(-5.0, 128) == []
    assert len(api.kernel_problems(None, 96)) == 2
    with pytest.raises(ProblemsError) as error:
        compiled("interpret", lower_bound=-6.0)(*make(0, tokens=1)._replace(lengths=np.float32([1, 1, 1])))
    assert "lower_bound = -6.0: kernels need one from -5.5 up and below 0" in str(error.value)
    assert len(error.value.problems) == 2


def test_problems_are_reported_together():
    # red when a check stops at the first
    case = make(0, tokens=2)
    weights = case.weights._replace(norm=case.weights.norm.astype(jnp.bfloat16), A_log=np.zeros(4, np.float32))
    projected = case.projected._replace(b=case.projected.b.astype(jnp.bfloat16), gate=case.projected.gate[:, :1])
    with pytest.raises(ProblemsError) as error:
        compiled("reference")(projected, weights, case.windows[:, :2], case.state, case.lengths)
    for part in (
        "gate has shape [3, 1, 32], not [3, 2, 32]",
        "A_log has shape [4], not [2]",
        "windows has shape [3, 2, 3, 32], not [3, 3, 3, 32]",
        "norm is bfloat16, not float32",
        "projections are bfloat16 beside float32: one dtype",
    ):
        assert part in str(error.value)
    assert len(error.value.problems) == 5


def test_unknown_implementation_is_refused():
    # red when an unknown name falls back
    with pytest.raises(
        ValueError, match=r"kda.attend has no implementation 'fast'; built: interpret, pallas, reference"
    ):
        compiled("fast")(*make(0, tokens=1))
