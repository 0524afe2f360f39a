"""Bounds of one step: the published check figures, the collectives of the traced step, and experts of a batch."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import KimiConfig, load_config, parse
from kimi_jax.loop import Limits, Rows, Steps
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.planning.bounds import step_of
from kimi_jax.planning.exchange import Local, collectives
from kimi_jax.planning.step import touched_experts, visible
from kimi_jax.precision import Precision
from kimi_jax.testing.configs import config_json

TINY = parse(config_json(), "tiny")
PRO = load_config(Path(__file__).parents[1] / "fixtures" / "k31-tiny" / "config.json")
EVERY_GROUP = "ptpc+latent+router+head"


def empty_step(layout="tp8", **options):
    """The decode step of one sequence with nothing cached."""
    plan = kimi_jax.plan("k3", layout, context=64, **options)
    return next(call.bound for call in plan.calls if call.kind == "decode" and call.context == 0)


def within_a_percent(bound, gigabytes: float, milliseconds: float) -> bool:
    near = lambda value, wanted: abs(value / wanted - 1) < 0.01  # noqa: E731
    return near(bound.bytes / 1e9, gigabytes) and near(bound.lower * 1e3, milliseconds)


def test_bf16_check_figures():
    # Red when the state is read once, experts are all read, or the embedding is read whole.
    assert within_a_percent(empty_step("tp8"), 27.3, 3.41)
    assert within_a_percent(empty_step("tp8-lean"), 17.4, 2.175)


def test_everything_split():
    # Red when a part is replicated that the figure takes as split. No layout cuts kv_a and f_a: they are added by hand.
    lean = empty_step("tp8-lean")
    kv_a, f_a = 24 * 576 * 7168 * 2, 69 * 128 * 7168 * 2
    split = lean.bytes - (kv_a + f_a) * 7 / 8
    assert f"{split / 1e9:.1f} {split / 8e12 * 1e3:.2f}" == "17.2 2.16"
    assert abs(split / 8e12 / 2.15e-3 - 1) < 0.01


def test_fp8_check_figures():
    # Red when FP8 reaches the experts, or leaves a group out: published 10.3 to 11.1 GB, 1.3 to 1.4 ms.
    shipped = 7 / 8 * (24 * 576 * 7168 + 69 * 128 * 7168)  # kv_a and f_a, one byte a value
    published, most = empty_step("tp8-lean", fp8="ptpc"), empty_step("tp8-lean", fp8=EVERY_GROUP)
    assert f"{(published.bytes - shipped) / 1e9:.1f} {(most.bytes - shipped) / 1e9:.1f}" == "11.1 10.3"
    assert f"{published.lower * 1e3:.1f} {most.lower * 1e3:.1f}" == "1.4 1.3"


@pytest.mark.parametrize("layout", ["tp8", "ep8", "tp4-ep2"])
def test_two_reductions_a_layer(layout):
    # Red when routed and shared sums are counted apart.
    assert empty_step(layout).collectives == 2 * 93 + 2


def test_the_lean_layout_pays_in_collectives(published):
    # Red when a gather of the split projections is not counted, or the answer is not given.
    assert empty_step("tp8-lean").collectives == 4 * 92 + 2 + 24 + 2
    trade = published.trade
    assert trade.collectives_added == 2 * 92 + 24
    assert f"{trade.bytes_saved / 1e9:.2f}" == "9.77"
    assert trade.worth is False  # 1.22 ms of reading against 208 latencies of 6.3 us
    assert any("not worth it" in note for note in published.to_json()["notes"])
    crowded = kimi_jax.plan("k3", "tp8-lean", context=64).trade
    assert crowded == trade


def _traced(config: KimiConfig, layout: Layout, rows: int):
    """Collectives of one decode step as JAX traces it: (kind, payload bytes) -> count, without compiling."""
    steps = Steps(config, layout, make_mesh(layout), Precision(), 64)
    like = lambda spec: jax.ShapeDtypeStruct(layout.placed_shape(spec), spec.dtype)  # noqa: E731
    is_spec = lambda value: isinstance(value, ArraySpec)  # noqa: E731
    params = {name: like(spec) for name, spec in steps.parameters.items()}
    cache = jax.tree.map(like, steps.describe_cache(rows), is_leaf=is_spec)
    row = lambda dtype: jax.ShapeDtypeStruct((rows,), dtype)  # noqa: E731
    ids, sampling = row(jnp.int32), Sampling(row(jnp.float32), row(jnp.float32), row(jnp.int32), row(jnp.uint32))
    limits = Limits(jax.ShapeDtypeStruct((config.vocab,), bool), jax.ShapeDtypeStruct((rows, 8), jnp.int32))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    traced = steps.decode(random=False).trace(params, cache, Rows(*[ids] * 4), sampling, limits, count)
    found = Counter()
    for equation in _equations(traced.jaxpr.jaxpr, inside=False):
        named = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce"}
        (kind,) = (kind for name, kind in named.items() if equation.primitive.name.startswith(name))
        value = (equation.outvars if kind == "all-gather" else equation.invars)[0].aval
        found[kind, value.size * np.dtype(value.dtype).itemsize] += 1
    return found


def _equations(jaxpr, inside):
    for equation in jaxpr.eqns:
        if inside and equation.primitive.name.startswith(("psum", "all_gather", "reduce_scatter", "all_to_all")):
            yield equation
        for key, value in equation.params.items():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, inside or (equation.primitive.name, key) == ("while", "body_jaxpr"))


CUT = dict.fromkeys(("heads", "ffn", "expert_ffn", "vocab"), ("a", "b"))
PARTLY = Layout("partly", mesh={"a": 4, "b": 2}, axes=CUT, cache={"sequence": "b"})
APART = Layout("apart", mesh={"a": 4, "b": 2}, axes=dict.fromkeys(CUT, "a"), cache={"sequence": ("b", "a")})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((TINY, name) for name in ("tp8", "tp8-lean", "tp4-ep2", "dp2-tp4", "tp8-dcp8", APART)),
        *((PRO, name) for name in ("tp8-dcp8", PARTLY)),
    ],
)
def test_the_planned_collectives_are_those_of_the_traced_step(config, name):
    # Red when a layer gains or loses a collective, or its payload changes, and the plan does not.
    layout, rows = load_layout(name), 4
    parallel = Parallel.of(layout)
    planned = collectives(config, parallel, Precision(), Local(rows / parallel.size("batch"), 1, 0))
    traced = _traced(config, layout, rows)
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        mine = [each for each in planned if each.kind == kind]
        theirs = {size: count for (found, size), count in traced.items() if found == kind}
        assert sum(each.count for each in mine) == sum(theirs.values())
        assert sum(each.count * each.bytes for each in mine) == sum(size * count for size, count in theirs.items())


def test_the_union_of_touched_experts():
    # Red when tokens are taken to choose different experts, or all of them.
    config = load_config("k3")
    assert touched_experts(config, 1) == pytest.approx(16)
    assert touched_experts(config, 2) == pytest.approx(16 + 16 * 880 / 896)
    assert 800 < touched_experts(config, 128) < 896
    draw = np.random.default_rng(3)
    unions = [len(set(np.concatenate([draw.choice(896, 16, replace=False) for _ in range(32)]))) for _ in range(50)]
    assert touched_experts(config, 32) == pytest.approx(np.mean(unions), rel=0.02)


def test_visible_rows_are_counted_one_by_one():
    # Red when the cap of the indexer, or the token itself, is off by one.
    for context in (0, 3, 10):
        for tokens in (1, 4, 9):
            for most in (None, 1, 5, 100):
                seen = [context + i + 1 if most is None else min(context + i + 1, most) for i in range(tokens)]
                assert visible(context, tokens, most) == sum(seen)


def test_a_sparse_model_reads_its_keys_and_few_rows():
    # Red when latent rows beyond the selection are read, or index keys are not.
    ask = kimi_jax.plan("k3.1-pro", "tp8", context=1 << 20).ask
    moved = {part.part: part.bytes for part in step_of(ask, 1, 1, (1 << 20) - 1).work}
    assert moved["latent"] == 24 * (2048 + 1) * 576
    assert moved["index_keys"] == 24 * ((1 << 20) + 1) * 132


def test_parts_add_up_to_the_step(published):
    # Red when a part is dropped between the step and the report.
    for call in published.to_json()["calls"]:
        known = sum(part["bytes"] for part in call["parts"] if not part["on_chip"])
        assert known == pytest.approx(call["bytes"], abs=20)
        times = [part["ms"] for part in call["parts"]] + [call["collective_ms"]]
        assert sum(times) == pytest.approx(call["modelled_ms"], rel=1e-5)
        assert call["lower_ms"] <= call["modelled_ms"]
        assert call["unknown"] == ["launch_latency"] and call["launch_ms"] is None


def test_a_full_context_costs_its_rows(published):
    # Red when cached rows are not read, or the state is.
    empty, full = (call.bound.bytes for call in published.calls if call.kind == "decode")
    assert full - empty == pytest.approx(24 * 576 * ((1 << 20) - 1))
