"""Loaded arrays lie where the layout says, hold what one device holds, and take the bytes that the plan counts (PF-27)."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from kimi_jax.placement.axes import ArraySpec
from tests.parity.models import tiny

LAYOUTS = ["single", "tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4"]
FORMS = ["packed", "codes"]


@pytest.mark.parametrize("experts", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_lie_where_the_layout_says(layout, experts):
    # red when a parameter is placed whole, cut along another axis, or padded otherwise than declared
    steps, params = (kimi := tiny(layout, experts=experts)).runner.steps, kimi.runner.params
    assert params.keys() == steps.parameters.keys()
    for name, spec in steps.parameters.items():
        array = params[name]
        assert array.shape == kimi.layout.placed_shape(spec), name
        assert array.dtype == spec.dtype, name
        assert array.sharding == NamedSharding(steps.mesh, kimi.layout.spec(spec)), name
        assert len(array.addressable_shards) == kimi.layout.devices, name
        assert {shard.data.shape for shard in array.addressable_shards} == {kimi.layout.local_shape(spec)}, name
        assert {shard.data.nbytes for shard in array.addressable_shards} == {kimi.layout.local_bytes(spec)}, name


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_bytes_of_every_device_add_up(layout):
    # red when a device holds more than its share, in sum: what the planner prints is what lies there
    kimi = tiny(layout, experts="packed")
    held: dict[int, int] = {}
    for array in kimi.runner.params.values():
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    planned = sum(map(kimi.layout.local_bytes, kimi.runner.steps.parameters.values()))
    assert set(held.values()) == {planned}
    whole = sum(spec.nbytes for spec in kimi.runner.steps.parameters.values())
    assert planned < whole


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_values_are_those_of_one_device(layout):
    # red when heads, experts or vocabulary rows change their order on the way (PF-24, PF-25)
    whole = tiny("single", experts="packed").runner.params
    kimi = tiny(layout, experts="packed")
    compared = 0
    for name, array in kimi.runner.params.items():
        if array.shape == whole[name].shape:
            np.testing.assert_array_equal(np.asarray(array), np.asarray(whole[name]), err_msg=name)
            compared += 1
    assert compared > 200  # all but experts that are padded to whole scale groups


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_lie_where_the_layout_says(layout):
    # red when a cache is made on one device first, or its heads or rows are not cut
    kimi = tiny(layout, experts="packed")
    steps = kimi.runner.steps
    specs = jax.tree.leaves(steps.describe_cache(4), is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    arrays = jax.tree.leaves(steps.new_cache(4))
    for spec, array in zip(specs, arrays, strict=True):
        assert array.sharding == NamedSharding(steps.mesh, kimi.layout.spec(spec))
        assert {shard.data.nbytes for shard in array.addressable_shards} == {kimi.layout.local_bytes(spec)}
        assert not np.asarray(array).any()
