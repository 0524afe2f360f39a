"""Tokens dealt to devices: fragments of any cut, composed, are the chunk form of all tokens; collectives do not grow with them."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.kda import fragments
from kimi_jax.ops.kda.inputs import Projected
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.mesh import make_mesh
from tests.ops import test_kda_attend as attend
from tests.ops.test_kda import LOG_DECAYS, TOKENS, compiled, golden_case, make, near, oracle
from tests.ops.test_kda_attend import DIM, HEADS, ROWS, same_bits
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

MESHES = {
    2: Layout("two", mesh={"t": 2}, axes={"tokens": "t"}),
    8: Layout("eight", mesh={"a": 2, "b": 4}, axes={"tokens": ("b", "a")}),  # the other way round than the mesh
}
"""Two devices gather their fragments; eight scan them."""


@cache
def passes():
    """One pass over a segment, padded to one width so that there is one program."""
    return jax.jit(partial(fragments.read, lower_bound=-5.0, form="chunked"))


def segments(case, cuts, width):
    """Each segment of the cut: its pass, and how many tokens it holds at most."""
    for start, stop in zip([0, *cuts], [*cuts, case.q.shape[1]], strict=True):
        part = case.tokens(start, stop, width, case.state)
        yield passes()(*part[:7], part.lengths), stop - start


def composed(case, cuts, width=TOKENS):
    """Outputs and end state by the fragments of a cut, folded over the state; and the same end state from their products."""
    state, outs = jnp.asarray(case.state), []
    whole = fragments.identity(state)
    for (out, reader, own), count in segments(case, cuts, width):
        outs.append(np.asarray(out + jnp.einsum("btnk,bnkv->btnv", reader, state, precision="highest"))[:, :count])
        state, whole = own(state), fragments.then(whole, own)
    near((whole(jnp.asarray(case.state)),) * 2, (np.asarray(state),) * 2, 2e-5)
    return np.concatenate(outs, axis=1), np.asarray(state)


@settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.integers(0, TOKENS), max_size=5).map(sorted),
    lengths=st.lists(st.integers(0, TOKENS), min_size=3, max_size=3),
    log_decay=st.sampled_from(LOG_DECAYS),
    repeated=st.booleans(),
)
def test_any_cut_is_the_chunk_form_of_all_tokens(seed, cuts, lengths, log_decay, repeated):
    # red when the second transition is applied first, a segment without tokens is no identity, or a transition decays its columns
    case = make(seed, lengths=lengths, log_decay=log_decay)
    if repeated:
        case = case._replace(k=np.broadcast_to(case.k[:, :1], case.k.shape).copy())
    whole = compiled("reference", "chunked", -5.0)(*case[:9])
    near(composed(case, cuts), [np.asarray(x) for x in whole], 2e-5)


@pytest.mark.parametrize("log_decay", (-5.0, -1e-4))
def test_extremes_against_float64(log_decay):
    # red when a transition is made from exponentials of positive sums: at -5 on every channel 500 tokens span exp(2500)
    case = make(7, tokens=500, rows=1, log_decay=log_decay)
    near(composed(case, (0, 120, 121, 400), 280), oracle(case), 2e-5)


@pytest.mark.parametrize("name", ("max_decay", "same_key"))
def test_golden(k3_golden, name):
    # red as above, beside numbers that are not this project's
    case, *expected = golden_case(k3_golden, name)
    near(composed(case, (40,), 60), expected, 2e-5)


def test_a_segment_without_tokens_changes_no_bit():
    case = make(3, lengths=[0, 0, 0])
    (_, _, own), _ = next(segments(case, (), TOKENS))
    assert same_bits(own.end, np.zeros_like(case.state))
    assert same_bits(own.transition, fragments.identity(jnp.asarray(case.state)).transition)


@cache
def program(parts: int, impl: str = "reference"):
    """``fragments.attend`` on a mesh, for tokens that are cut along dim 1."""
    layout = MESHES[parts]
    tokens, whole = P(None, layout.mesh_axes("tokens")), P()

    def run(projected, weights, windows, state, shares):
        return fragments.attend(
            projected, weights, windows, state, shares, Parallel.of(layout), lower_bound=-5.0, eps=attend.EPS, impl=impl
        )

    given = (Projected(*[tokens] * 6), whole, whole, whole, whole)
    mapped = jax.shard_map(
        run, mesh=make_mesh(layout), in_specs=given, out_specs=(tokens, whole, whole), check_vma=False
    )
    return jax.jit(mapped)


def on_devices(case: attend.Case, parts: int, impl: str = "reference"):
    count = case.projected.v.shape[1]
    width = -(-count // parts)
    padded = case.tokens(0, count, width * parts, case.windows, case.state)
    shares = np.clip(case.lengths - width * np.arange(parts)[:, None], 0, width).astype(np.int32)
    out, windows, state = program(parts, impl)(padded.projected, case.weights, case.windows, case.state, shares)
    return np.asarray(out)[:, :count], np.asarray(windows), np.asarray(state)


@pytest.mark.parametrize(
    "parts, tokens, lengths",
    [(2, 67, (67, 34, 0)), (8, 13, (13, 2, 0))],
    ids=["two", "eight-shares-shorter-than-a-window"],
)
def test_shares_on_devices(parts, tokens, lengths):
    # red when a window comes from the nearest neighbour only, the scan leaves its first share out, the order of devices is that of
    # the mesh, or an idle row's state or window changes a bit
    case = attend.make(tokens, tokens=tokens, lengths=lengths)
    got, expected = on_devices(case, parts), attend.oracle(case)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))
    for row in np.flatnonzero(case.lengths == 0):
        assert same_bits(got[1][row], case.windows[row]) and same_bits(got[2][row], case.state[row])


@pytest.mark.slow
def test_shares_through_kernels():
    # red when a kernel takes an identity beside the values for more heads, or the pass over tokens does not use it
    case = attend.make(5, tokens=67, lengths=(67, 34, 0))
    for a, b in zip(on_devices(case, 2, "interpret"), attend.oracle(case), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


COLLECTIVE = re.compile(r"= (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(parts: int, tokens: int) -> list[tuple[str, str]]:
    case = attend.make(1, tokens=tokens)
    shares = np.zeros((parts, ROWS), np.int32)
    lowered = program(parts).lower(case.projected, case.weights, case.windows, case.state, shares)
    return sorted((name, shape.split("{")[0]) for shape, name in COLLECTIVE.findall(lowered.compile().as_text()))


@pytest.mark.parametrize("parts", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_collectives_do_not_grow_with_the_tokens(parts):
    # red when tokens themselves travel, or a round of the scan moves two arrays
    found = collectives(parts, 32)
    assert found == collectives(parts, 128)
    fragment, state = f"f32[{ROWS},{HEADS},{DIM},{2 * DIM}]", f"f32[{ROWS},{HEADS},{DIM},{DIM}]"
    window = f"f32[{parts},{ROWS},3,3,{HEADS * DIM}]"
    if parts == 2:
        assert found == [("all-gather", f"f32[2,{fragment[4:]}"), ("all-gather", window)]
    else:
        rounds = [("collective-permute", shape) for shape in (state, *[fragment] * 3)]
        assert sorted(found) == sorted([("all-gather", window), ("all-reduce", state), *rounds])
