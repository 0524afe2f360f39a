"""Steady state: nothing compiles again, caches are donated, and the decode loop carries only what changes (PF-64, PF-65)."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kimi_jax.engine.request import MAX_STOPS, Request
from kimi_jax.loop import Limits, Rows, Steps
from kimi_jax.ops.sample.api import Sampling
from tests.parity.compilations import compilations
from tests.parity.light import light_compilation as light_compilation
from tests.parity.quick import CAPACITY, answers, ids, quick

pytestmark = pytest.mark.usefixtures("light_compilation")


@pytest.fixture(scope="module")
def warm(light_compilation):
    """The quick model after one request of each kind: greedy, drawn, scores; and two greedy rows."""
    kimi = quick()
    for temperature in (0.0, 0.7):
        answers(kimi.runner, [Request(ids(20), max_tokens=3, temperature=temperature)])
    answers(kimi.runner, [Request(ids(9), max_tokens=3)] * 2)
    kimi.logits(ids(20))
    return kimi


def test_the_counter_counts():
    # red when JAX renames its event, which would make the tests below prove nothing
    with compilations() as count:
        jax.jit(lambda x: x * 3 + 1)(np.arange(5.0))
        assert count() > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.3, "seed": 7},
        {"temperature": 0.2, "top_k": 3, "top_p": 0.5, "seed": 2**32 - 1},
        {"temperature": 1e-9, "top_k": 1},
        {"stops": (5, 6, 7)},
        {"max_tokens": 1},
        {"max_tokens": 100},
    ],
    ids=repr,
)
def test_other_requests_compile_nothing(warm, options):
    # red when a length, an option or a seed becomes part of a program, or an array is made with a new shape on the way
    with compilations() as count:
        for length in (1, 2, 15, 16, 17, CAPACITY - 1):
            answers(warm.runner, [Request(ids(length, length), **{"max_tokens": 9, **options})])
        assert count() == 0


def test_other_pairs_compile_nothing(warm):
    # red when the cache of another batch size, made anew, compiles again
    with compilations() as count:
        for length in (1, 7, 16):
            answers(warm.runner, [Request(ids(length), max_tokens=2, stops=(7,)), Request(ids(3), max_tokens=30)])
            answers(warm.runner, [Request(ids(length), max_tokens=2)])
        assert count() == 0


def test_other_scores_compile_nothing(warm):
    # red when the scores of a prompt are cut to its length on the device
    with compilations() as count:
        for length in (1, 2, 7, 16, 17, CAPACITY):
            assert len(warm.logits(ids(length, length))) == length
        assert count() == 0


def test_the_public_face_compiles_nothing(warm):
    # red when generate, generate_batch or stream touch the device outside the compiled steps
    with compilations() as count:
        warm.generate(ids(9), 5, temperature=0.5, logprobs=True)
        warm.generate_batch([ids(3), ids(16)], 4)
        list(warm.stream(ids(11), 6))
        next(warm.stream(ids(11), 6))  # left early
        warm.generate(ids(4), 5, seed=3)
        assert count() == 0


def test_feeding_ids_compiles_nothing(warm):
    # red when ids that come from the host make another program than ids that were drawn: benchmarks would time its making
    with compilations() as count:
        batch = warm.runner.open([Request(ids(9), max_tokens=20)])
        for token in ids(4, 2):
            batch.feed(np.array([token], np.int32))
        batch.close()
        assert count() == 0


def test_caches_are_donated_and_weights_are_not(warm):
    # red without donate_argnums, and when a cache comes back in another dtype or layout: then its buffers cannot be
    # reused, of which the warning ("donated buffers were not usable") is an error here
    steps, params = warm.runner.steps, warm.runner.params
    grid, starts, new, rows, sampling, limits, count = arguments(steps)
    first = steps.new_cache(1)
    _, second = steps.score(params, first, grid, starts, new)
    third = steps.extend(params, second, grid, starts, new)
    fourth, drawn_rows, _ = steps.prefill(random=False)(params, third, grid, new, rows, sampling, limits)
    fifth, _, _ = steps.decode(random=False)(params, fourth, drawn_rows, sampling, limits, count)
    last = steps.reset(fifth, np.ones(1, bool))
    for given in (first, second, third, fourth, fifth):
        assert all(array.is_deleted() for array in jax.tree.leaves(given))
    assert not any(array.is_deleted() for array in (*params.values(), *jax.tree.leaves(last)))


def arguments(steps: Steps) -> tuple[Any, ...]:
    """Small arguments of the steps for one row: ids, starts, new, rows, sampling, limits, steps."""
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    sampling = Sampling(zero.astype(np.float32), one.astype(np.float32), zero, zero.astype(np.uint32))
    limits = Limits(np.ones(steps.config.vocab, bool), np.full((1, MAX_STOPS), -1, np.int32))
    return np.ones((1, 16), np.int32), zero, one, Rows(one, zero, one * 4, zero), sampling, limits, np.int32(3)


def test_the_decode_loop_carries_no_weights(warm):
    # red when parameters ride in the carry, which copies or pins them at every step
    steps, params = warm.runner.steps, warm.runner.params
    cache = steps.new_cache(1)
    traced = steps.decode(random=False).trace(params, cache, *arguments(steps)[3:])
    (loop,) = [loop for loop in loops(traced.jaxpr.jaxpr) if loop.params["body_nconsts"] >= len(params)]
    carried = loop.invars[loop.params["cond_nconsts"] + loop.params["body_nconsts"] :]
    # the step, whether anyone goes on, four arrays of the rows, two of drawn ids; and the cache
    assert len(carried) == 8 + len(jax.tree.leaves(cache))


def loops(jaxpr: Any) -> Iterator[Any]:
    """Every while loop of a program, outermost first."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from loops(getattr(inner, "jaxpr", inner))
