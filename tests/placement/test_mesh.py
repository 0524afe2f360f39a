"""The mesh of a layout."""

import jax
import pytest
from jax.sharding import AxisType

from kimi_jax.placement.layout import Layout, LayoutError, load_layout
from kimi_jax.placement.mesh import make_mesh


def test_axes_sizes_and_order_come_from_the_layout():
    # Red when the order is sorted, or the axes are left Explicit.
    mesh = make_mesh(load_layout("tp4-ep2"))
    assert mesh.axis_names == ("tensor", "expert") and mesh.devices.shape == (4, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_only_as_many_devices_as_needed():
    # Red when all devices are handed to make_mesh.
    assert make_mesh(load_layout("single")).devices.size == 1
    assert make_mesh(load_layout("single"), jax.devices()[3:]).devices.item() == jax.devices()[3]


def test_too_few_devices_gives_the_line_to_add():
    # Red when the line is missing or names another number.
    layout = Layout("tp16", mesh={"tensor": 16})
    with pytest.raises(LayoutError, match=r"it needs 16 devices, there are 8") as caught:
        make_mesh(layout)
    assert 'jax.config.update("jax_num_cpu_devices", 16)' in caught.value.hint
