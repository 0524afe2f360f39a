"""What must hold for any plan: bytes grow with what is asked, and the devices hold at least the whole."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_jax
from kimi_jax.config import parse
from kimi_jax.loop import Steps
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.files import shipped_names
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.planning.ask import changed
from kimi_jax.planning.sizes import sizes
from kimi_jax.precision import choose_precision
from kimi_jax.testing.configs import config_json

TINY = parse(config_json(), "tiny")
layouts = st.sampled_from(shipped_names("layouts"))


def tiny(layout="tp8", context=64, batch=1, **options):
    return kimi_jax.plan(TINY, layout, "cpu", context, batch, **options)


@settings(max_examples=25)
@given(layouts, st.integers(1, 4000), st.integers(1, 20), st.integers(0, 300), st.integers(0, 9))
def test_bytes_never_fall_with_context_or_batch(layout, context, batch, tokens, rows):
    # Red when a share is rounded down.
    ask = tiny(layout).ask
    few = sizes(changed(ask, context=context, batch=batch))
    many = sizes(changed(ask, context=context + tokens, batch=batch + rows))
    assert many.device_bytes >= few.device_bytes
    assert many.weight_bytes == few.weight_bytes


@settings(max_examples=25)
@given(layouts, st.integers(1, 500), st.integers(1, 9))
def test_all_devices_together_hold_at_least_the_whole(layout, context, batch):
    # Red when a device's share of an array is smaller than a fair one.
    found = sizes(changed(tiny(layout).ask, context=context, batch=batch))
    devices = load_layout(layout).devices
    for row in (*found.weights.values(), *found.state.values()):
        assert row.per_device * devices >= row.whole
        assert row.per_device <= row.whole + row.padding


@given(st.sampled_from(["heads", "ffn", "vocab", "latent", "router_expert", "q_lora", "expert", "decay_rank"]))
def test_cutting_an_axis_never_adds_bytes(axis):
    # Red when a cut array is counted whole.
    whole = Layout("whole", mesh={"tensor": 8})
    cut = Layout("cut", mesh={"tensor": 8}, axes={axis: "tensor"})
    assert tiny(cut).weight_bytes < tiny(whole).weight_bytes


@pytest.mark.parametrize("layout", ["single", "tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4"])
def test_the_plan_is_what_is_placed(layout):
    # Red when a planned share differs from the arrays that the engine makes, for weights or caches.
    placed = load_layout(layout)
    mesh = make_mesh(placed)
    precision = choose_precision("bfloat16", "fp8", "cpu", index_dtype="fp8")
    steps = Steps(TINY, placed, mesh, precision, 48)
    plan = tiny(layout, 48, 4)
    assert _held(steps.new_cache(plan.ask.rows)) == plan.cache_bytes
    weights = [_place(spec, placed, mesh) for spec in steps.parameters.values()]
    assert _held(weights) == plan.weight_bytes
    assert steps.parameters == dict(plan.ask.weights)


def _place(spec: ArraySpec, layout: Layout, mesh: jax.sharding.Mesh) -> jax.Array:
    sharding = jax.sharding.NamedSharding(mesh, layout.spec(spec))
    shape = layout.placed_shape(spec)

    def block(index):
        return np.zeros([len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)], spec.dtype)

    return jax.make_array_from_callback(shape, sharding, block)


def _held(arrays) -> int:
    """Bytes of one device's shards."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(arrays))
