"""Device sheets: shipped numbers, their sources, and files that are wrong."""

import dataclasses
from pathlib import Path

import pytest

from kimi_jax.placement.device import DeviceError, load_device
from kimi_jax.placement.files import sharding_folder

SHIPPED = sorted(path.stem for path in (sharding_folder() / "devices").glob("*.toml"))


def test_shipped_devices():
    # Red when a file is renamed.
    assert SHIPPED == ["cpu", "h200", "mi300x", "mi355x"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source(name: str):
    # Red when a number is read without its source.
    device = load_device(name)
    stated = {"devices", "hbm_bytes", "hbm_bandwidth", "link_bandwidth", "link_latency", "launch_latency"}
    stated |= {f"peak.{dtype}" for dtype, _ in device.peaks} | {f"compiler.{key}" for key, _ in device.compiler}
    assert {key for key, source in device.sources if source} == stated
    assert device.name == name and hash(device) == hash(load_device(name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.hbm_bytes = 1


def test_the_target():
    # Red when bytes or bandwidths are given in other units, or a sparse peak is taken for a dense one.
    device = load_device("mi355x")
    assert (device.hbm_bytes, device.hbm_bandwidth, device.devices, device.target) == (288 * 2**30, 8e12, 8, "gfx950")
    assert device.link_bandwidth == pytest.approx(7 * 76.8e9)
    assert [device.peak(dtype) for dtype in ("fp4", "fp8", "bf16")] == [10.1e15, 5e15, 2.5e15]


def test_a_missing_dtype_runs_at_the_next_wider_one():
    # Red when fp4 on a chip without fp4 units is an error, or takes the fp32 peak.
    assert load_device("h200").peak("fp4") == load_device("h200").peak("fp8")
    assert load_device("cpu").peak("bf16") is None
    with pytest.raises(KeyError, match="did you mean"):
        load_device("h200").peak("bf61")


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path):
    # Red when a number without a source passes, or reading stops at the first problem.
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        hbm_byte = 3
        hbm_bytes = 288
        hbm_bandwidth = { value = -1, source = "x" }
        link_bandwidth = { value = 1, source = " " }
        link_latency = { value = "unknown", sauce = "nobody" }
        launch_latency = { value = "unknown", source = "nobody" }
        devices = { value = 8, source = "x" }
        [peak]
        bf17 = { value = 1, source = "x" }
        """
    )
    with pytest.raises(DeviceError) as caught:
        load_device(path)
    assert len(caught.value.problems) == 7
    for piece in (
        'no key "hbm_byte"; did you mean "hbm_bytes"?',
        "hbm_bytes must be { value",
        "hbm_bandwidth.value must be a positive number",
        "link_bandwidth.source must say where",
        'link_latency has no key "sauce"; did you mean "source"?',
        '[peak] has no key "bf17"; did you mean "bf16"?',
    ):
        assert piece in str(caught.value)


def test_an_unknown_device_names_the_nearest():
    # Red when the nearest name is not offered.
    with pytest.raises(DeviceError, match='did you mean "mi355x"'):
        load_device("mi355")
