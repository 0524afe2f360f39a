import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax.ops.kda import api, reference
from kimi_jax.problems import ProblemsError

FORMS = ("recurrent", "chunked")
LOG_DECAYS = (-1e-4, -0.05, -1.0, -5.0, None)  # None: each channel of each token at one of the others (PF-02)
TOKENS = 2 * reference.CHUNK + 3  # most tests share this size, and so a compiled program
GOLDEN = (
    *("len1", "len15", "len16", "len17", "len63", "len64", "len65", "long", "wide", "max_decay", "no_decay"),
    *("mixed_decay", "beta_one", "beta_zero", "same_key", "zero_qk", "tiny_qk", "big_qkv", "steep_gate"),
)


class Case(NamedTuple):
    """Inputs of one call, as numpy arrays."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    f: np.ndarray
    b: np.ndarray
    A_log: np.ndarray
    dt_bias: np.ndarray
    state: np.ndarray
    lengths: np.ndarray
    lower_bound: float | None = -5.0

    def tokens(self, start: int, stop: int, width: int, state: np.ndarray) -> "Case":
        """These tokens of every row after ``state``, padded with zeros to ``width``."""
        cut = (
            np.pad(x[:, start:stop], [(0, 0), (0, width - stop + start)] + [(0, 0)] * (x.ndim - 2)) for x in self[:5]
        )
        lengths = np.clip(self.lengths - start, 0, stop - start)
        return Case(*cut, self.A_log, self.dt_bias, state, lengths, self.lower_bound)


def make(
    seed, *, tokens=TOKENS, rows=3, heads=2, key=8, value=12, log_decay=None, lengths=None, lower_bound=-5.0
) -> Case:
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    A_log, dt_bias = normal(heads), normal(heads, key)
    wide = (rows, tokens, heads, key)
    target = np.full(wide, log_decay) if log_decay else random.choice(LOG_DECAYS[:-1], wide)
    ratio = np.clip(target / (lower_bound or -5.0), 1e-9, 1 - 1e-9)
    f = (np.log(ratio / (1 - ratio)) / np.exp(A_log)[:, None] - dt_bias).astype(np.float32)
    return Case(
        q=normal(*wide) * 3,
        k=normal(*wide) * 3,
        v=normal(rows, tokens, heads, value) * 3,
        f=f,
        b=normal(rows, tokens, heads) * 2,
        A_log=A_log,
        dt_bias=dt_bias,
        state=normal(rows, heads, key, value),
        lengths=np.full(rows, tokens, np.int32) if lengths is None else np.int32(lengths),
        lower_bound=lower_bound,
    )


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64, as text-model section 3.1 writes it; padded outputs are zeros."""
    q, k, v, f, b, A_log, dt_bias, state = (np.float64(x) for x in case[:8])
    out, state = np.zeros_like(v), state.copy()
    slope = np.exp(A_log)
    for row, head in np.ndindex(state.shape[:2]):
        for t in range(case.lengths[row]):
            at = (row, t, head)
            logit = f[at] + dt_bias[head]
            if case.lower_bound is None:
                g = -slope[head] * np.logaddexp(0, logit)
            else:
                g = case.lower_bound * (1 + np.tanh(slope[head] * logit / 2)) / 2
            unit_q, unit_k = (x[at] / np.sqrt(x[at] @ x[at] + 1e-6) for x in (q, k))
            decayed = np.exp(g)[:, None] * state[row, head]
            beta = 1 / (1 + np.exp(-b[at]))
            state[row, head] = decayed + beta * np.outer(unit_k, v[at] - decayed.T @ unit_k)
            out[at] = state[row, head].T @ unit_q * q.shape[-1] ** -0.5
    return out, state


def golden_case(golden: dict[str, np.ndarray], name: str) -> tuple[Case, np.ndarray, np.ndarray]:
    read = {key.split("/")[2]: array for key, array in golden.items() if key.startswith(f"kda/{name}/")}
    inputs = (read[x][None] for x in "qkvfb")
    lengths = np.int32([len(read["q"])])
    case = Case(*inputs, read["A_log"], read["dt_bias"], read["S0"][None], lengths, float(read["lower_bound"]))
    return case, read["o"][None], read["S"][None]


def near(got, expected, tolerance=1e-5):
    for name, a, b in zip(("out", "state"), got, expected, strict=True):
        limit = tolerance * max(np.abs(b).max(), 1e-30)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=name)


@cache
def compiled(impl: str, form: str, lower_bound: float | None):
    return jax.jit(partial(api.kda, lower_bound=lower_bound, form=form, impl=impl))


every_subclass = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=25)


def pytest_generate_tests(metafunc):
    """Tests of a contract run once for each form that their implementation has."""
    if "form" in metafunc.fixturenames:
        metafunc.parametrize("form", metafunc.cls.forms)


class KdaContract:
    """What every implementation of kda must do. Subclasses set `impl`, and what it is built for."""

    impl: str
    forms: tuple[str, ...] = FORMS

    def run(self, case: Case, form: str) -> tuple[np.ndarray, np.ndarray]:
        out, state = compiled(self.impl, form, case.lower_bound)(*case[:9])
        assert out.dtype == state.dtype == np.float32  # PF-07, whatever the inputs are
        return np.asarray(out), np.asarray(state)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden(self, k3_golden, name, form):
        case, expected, state = golden_case(k3_golden, name)
        tokens = expected.shape[1]
        width = tokens if tokens > 100 or (form == "chunked" and "len" in name) else 100
        out, got = self.run(case.tokens(0, tokens, width, case.state), form)
        near((out[:, :tokens], got), (expected, state))  # red with: decay after the update, read before it, eps outside

    @pytest.mark.parametrize("log_decay", LOG_DECAYS)
    @pytest.mark.parametrize("tokens", (63, 64, 65, 500))
    def test_against_float64(self, tokens, log_decay, form):
        case = make(tokens, tokens=tokens, rows=1, log_decay=log_decay)
        near(self.run(case, form), oracle(case))  # red when the state takes the decay of the chunk's start for its end

    @every_subclass
    @given(
        seed=st.integers(0, 2**32 - 1),
        log_decay=st.sampled_from(LOG_DECAYS),
        lengths=st.lists(st.integers(0, TOKENS), min_size=3, max_size=3),
    )
    def test_ragged_rows(self, form, seed, log_decay, lengths):
        case = make(seed, log_decay=log_decay, lengths=lengths)
        out, state = self.run(case, form)
        near((out, state), oracle(case))  # red when padded keys write, or padded gates decay
        for row, length in enumerate(lengths):
            assert not out[row, length:].any()
            if length == 0:
                assert np.array_equal(state[row].view(np.int32), case.state[row].view(np.int32))

    @pytest.mark.parametrize("junk", (1e4, np.nan, np.inf))
    @pytest.mark.parametrize("tokens", (1, TOKENS))
    def test_padding_never_matters(self, tokens, junk, form):
        clean = make(1, tokens=tokens, lengths=[0, 1, tokens // 2])
        clean.state[0].flat[:3] = -0.0, np.nan, 1e-40  # an idle slot may hold anything, and keeps it
        padded = np.arange(tokens) >= clean.lengths[:, None]
        dirty = clean._replace(
            **{name: np.where(np.expand_dims(padded, tuple(range(2, x.ndim))), np.float32(junk), x)
               for name, x in zip("qkvfb", clean[:5], strict=True)}
        )  # fmt: skip
        out, state = self.run(dirty, form)
        for a, b in zip(self.run(clean, form), (out, state), strict=True):
            assert np.array_equal(a.view(np.int32), b.view(np.int32))  # PF-03; red when padding is multiplied by zero
            assert np.isfinite(a[1:]).all()
        assert np.array_equal(state[0].view(np.int32), clean.state[0].view(np.int32))
        assert not out[padded].any()  # red when an idle slot's NaN reaches its outputs

    @every_subclass
    @given(seed=st.integers(0, 2**32 - 1), log_decay=st.sampled_from(LOG_DECAYS), cut=st.integers(0, TOKENS))
    def test_split_anywhere(self, form, seed, log_decay, cut):
        case = make(seed, log_decay=log_decay, lengths=[TOKENS, 30, 16])
        whole = self.run(case, form)
        head, state = self.run(case.tokens(0, cut, TOKENS, case.state), form)
        tail, state = self.run(case.tokens(cut, TOKENS, TOKENS, state), form)
        joined = np.concatenate([head[:, :cut], tail[:, : TOKENS - cut]], axis=1)
        near((joined, state), whole)  # red when the state returned is not the state after the last real token

    @pytest.mark.parametrize("value", (8, 12))
    def test_prefill_then_decode(self, value):
        case = make(3, value=value)  # PF-04: with value != key and value == key
        whole = self.run(case, "chunked")
        head, state = self.run(case.tokens(0, 18, TOKENS, case.state), "chunked")
        steps = [head[:, :18]]
        for t in range(18, TOKENS):  # red when the one-token step takes the state as [value, key]
            out, state = self.run(case.tokens(t, t + 1, 1, state), "auto")
            steps.append(out)
        near((np.concatenate(steps, axis=1), state), whole)

    @pytest.mark.parametrize(("tokens", "lower_bound"), ((64, -5.0), (500, -5.0), (64, -5.5)))
    def test_strongest_decay(self, tokens, lower_bound, form):
        case = make(4, tokens=tokens, rows=1, lower_bound=lower_bound)
        case = case._replace(f=np.full_like(case.f, 1e4))  # PF-01: every g at its bound, to the last bit
        got = self.run(case, form)
        assert all(np.isfinite(x).all() for x in got)
        near(got, oracle(case))  # red when a block's anchor is its start, or with exp of a chunk's plain running sum

    def test_repeated_keys(self, form):
        case = make(5)
        case = case._replace(k=np.broadcast_to(case.k[:, :1], case.k.shape), b=np.full_like(case.b, 2.2))
        case = case._replace(f=np.full_like(case.f, -1e4))
        near(self.run(case, form), oracle(case), 3e-6)  # red with the product form of the inverse

    def test_beta_stays_float32(self, form):
        case = make(6, tokens=1, rows=1)
        case = case._replace(b=jnp.full((1, 1, 2), 0.5, jnp.bfloat16), state=np.zeros_like(case.state))
        unit = case.k / np.sqrt(np.sum(case.k**2, -1, keepdims=True) + 1e-6)
        expected = 0.6224593 * np.einsum("btnk,btnv->bnkv", unit, case.v)  # PF-07: 0.62109375 when rounded to bfloat16
        np.testing.assert_allclose(self.run(case, form)[1], expected, rtol=1e-6)

    def test_bfloat16_inputs_are_widened_first(self, form):
        case = make(7)
        narrow = case._replace(**{name: jnp.asarray(getattr(case, name), jnp.bfloat16) for name in "qkvfb"})
        wide = narrow._replace(**{name: np.asarray(getattr(narrow, name), np.float32) for name in "qkvfb"})
        for a, b in zip(self.run(narrow, form), self.run(wide, form), strict=True):
            assert np.array_equal(a, b)  # red when the unit length or the gate is computed in the input dtype

    def test_unbounded_gate(self):
        case = make(8, lower_bound=None)  # PF-09: -exp(A_log) * softplus(f + dt_bias)
        near(self.run(case, "auto"), oracle(case))
        far = case._replace(f=case.f * 100)  # decays far below exp(-88) within one chunk
        near(self.run(far, "auto"), oracle(far))

    def test_rows_do_not_mix(self, form):
        case = make(9)
        out, state = self.run(case, form)
        for row in range(3):
            alone = Case(*(x[row : row + 1] for x in case[:5]), *case[5:7], *(x[row : row + 1] for x in case[7:9]))
            near(self.run(alone, form), (out[row : row + 1], state[row : row + 1]), 2e-6)

    @pytest.mark.parametrize("tokens", (1, 2))
    def test_auto_is_one_of_the_forms(self, tokens):
        case = make(10, tokens=tokens)
        auto, expected = self.run(case, "auto"), self.run(case, "recurrent" if tokens == 1 else "chunked")
        assert all(np.array_equal(a, b) for a, b in zip(auto, expected, strict=True))

    @pytest.mark.slow
    def test_gradients(self):
        case = make(11, log_decay=-5.0, lengths=[TOKENS, 13, 0])
        case.f[0] = 1e4

        def loss(arrays, form):
            out, state = compiled(self.impl, form, -5.0)(*arrays, case.lengths)
            return jnp.sum(out**2) + jnp.sum(state**2)

        one, other = (jax.jit(jax.grad(partial(loss, form=form)))(case[:8]) for form in FORMS)
        for a, b in zip(one, other, strict=True):
            assert np.isfinite(a).all()  # red when masked pairs overflow
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(np.abs(b).max(), 1e-3))

    @pytest.mark.parametrize("platform", ("cpu", "cuda", "rocm"))
    @pytest.mark.parametrize(("written", "tokens", "budget"), (("recurrent", 1, 150), ("chunked", 512, 300)))
    def test_lowering(self, platform, written, tokens, budget):
        """No library call, every product at the highest precision, and a size that 69 unrolled layers can afford."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make(12, tokens=tokens)[:9]]
        text = compiled(self.impl, written, -5.0).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        operations = re.findall(r"= \"?(stablehlo\.\w+)", text)
        assert not {x for x in operations if re.search("custom_call|triangular|convolution|reduce_window", x)}
        products = operations.count("stablehlo.dot_general")
        assert products and len(re.findall("precision = .HIGHEST, HIGHEST.", text)) == products  # PF-67
        assert len(operations) < budget


class TestReference(KdaContract):
    impl = "reference"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_gate(k3_golden, name):
    case, *_ = golden_case(k3_golden, name)
    f, A_log, dt_bias = (jnp.asarray(x) for x in (case.f, case.A_log, case.dt_bias))
    g = reference.log_decay(f, A_log, dt_bias, case.lower_bound)
    np.testing.assert_allclose(g[0], k3_golden[f"kda/{name}/g"], rtol=2e-5, atol=1e-6)  # red with the slope outside


def test_gate_without_bound():
    g = reference.log_decay(jnp.ones((1, 1)), jnp.log(jnp.full(1, 2.0)), jnp.full((1, 1), -0.5), None)
    np.testing.assert_allclose(g, -2 * np.log1p(np.exp(0.5)), rtol=1e-6)  # PF-09: -2 ln(1 + e^0.5) = -1.948154


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from((2, 4, 8, 16)), st.floats(0.0, 1.0))
def test_unit_lower_inverse(seed, size, spread):
    random = np.random.default_rng(seed)  # from all entries equal to independent ones: 0.9 everywhere is a repeated key
    strict = np.tril(0.9 - spread * random.random((3, size, size)), -1).astype(np.float32)
    got = jax.jit(reference.unit_lower_inverse)(strict)
    expected = np.linalg.inv(np.eye(size) + np.float64(strict))
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=2e-6
    )  # red with the product form (1e-4), or one level missing


def test_problems_are_reported_together():
    case = make(0, tokens=4)
    wrong = case._replace(A_log=np.zeros(4, np.float32), state=case.state.astype(jnp.bfloat16), v=case.v[:, :3])
    with pytest.raises(ProblemsError) as error:
        api.kda(*wrong[:9], lower_bound=1.0, form="fast")
    for part in (
        "lower_bound = 1.0 is not below 0",
        "form 'fast' is not built; choose auto, recurrent or chunked",
        "v has shape [3, 3, 2, 12], not [3, 4, 2, 12]",
        "A_log has shape [4], not [2]",
        "state is bfloat16, not float32",
    ):
        assert part in str(error.value)
    assert len(error.value.problems) == 5


@pytest.mark.parametrize("lower_bound", (None, -6.0))
def test_chunks_need_a_bounded_gate(lower_bound):
    case = make(0)
    with pytest.raises(ProblemsError, match=r"'chunked' needs lower_bound >= -5.5, not .*; 'recurrent' and 'auto'"):
        compiled("reference", "chunked", lower_bound)(*case[:9])
    near(compiled("reference", "auto", lower_bound)(*case[:9]), oracle(case._replace(lower_bound=lower_bound)))


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"kda \(chunked\) has no implementation 'fast'; built: .*reference"):
        compiled("fast", "auto", -5.0)(*make(0)[:9])
