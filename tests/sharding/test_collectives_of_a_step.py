"""The collectives of a compiled decode step are few, fixed, and behind no branch (design goal; PF-28)."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from kimi_jax.engine.request import MAX_STOPS
from kimi_jax.loop import Limits, Rows
from kimi_jax.ops.sample.api import Sampling
from tests.parity.models import tiny

ROWS = 8
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
PRIMITIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin"),
    *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter"),
}


def traced(layout: str, random: bool = False) -> Any:
    steps, params = tiny(layout).runner.steps, tiny(layout).runner.params
    number = np.zeros(ROWS, np.int32)
    fraction = np.ones(ROWS, np.float32)
    limits = Limits(np.ones(384, bool), np.full((ROWS, MAX_STOPS), -1, np.int32))
    sampling = Sampling(fraction, fraction, number, number.astype(np.uint32))
    rows = Rows(number, number, number, number)
    return steps.decode(random=random).trace(params, steps.new_cache(ROWS), rows, sampling, limits, np.int32(4))


@cache
def counted(layout: str) -> Counter[str]:
    """Collectives in the program that XLA made of a greedy decode block: one step, since its loop is not unrolled."""
    return Counter(COLLECTIVE.findall(traced(layout).lower().compile().as_text()))


def sizes() -> tuple[int, int]:
    config = tiny().config
    return config.layers, len(config.layers_of("mla"))


def test_two_reductions_a_layer():
    # red when partial sums that could travel together are reduced one by one, or anything but the sampled id is gathered
    layers, _ = sizes()
    found = counted("tp8")
    assert found["all-reduce"] <= 2 * layers + 4  # 27 found: two a layer and the embedding
    assert found["all-gather"] <= 1
    assert set(found) <= {"all-reduce", "all-gather"}


@pytest.mark.slow
def test_four_collectives_a_layer_where_the_latent_is_cut():
    # red when the router's and the latent's gather are two
    layers, latent_layers = sizes()
    found = counted("tp8-lean")
    assert found.total() <= 4 * layers + latent_layers + 4  # 56 found: 39 reductions and 17 gathers
    assert set(found) <= {"all-reduce", "all-gather"}


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("layout", ["tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4"])
def test_no_collective_behind_a_branch(layout, random):
    # red when devices could disagree on whether, or how often, they meet: in a conditional, or in an inner loop
    found = list(collectives(traced(layout, random).jaxpr.jaxpr))
    assert len(found) > 2 * sizes()[0]
    for path in found:
        assert "cond" not in path
        assert path.count("while") <= 1, path  # the loop over steps, whose end all devices know
        assert "scan" not in path or "while" in path


def test_the_loop_ends_everywhere_at_once():
    # red when a replica looks at its own rows only: it would leave the loop while the others wait in a collective
    found = [path for path in collectives(traced("dp2-tp4").jaxpr.jaxpr) if path.count("while") == 0]
    assert found, "whether any row goes on must be summed over the replicas before the loop"


def collectives(jaxpr: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The enclosing primitives of every collective of a program."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in PRIMITIVES:
            yield path
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from collectives(getattr(inner, "jaxpr", inner), (*path, name))


def _is_program(value: Any) -> bool:
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")
