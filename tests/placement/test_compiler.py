"""JAX calls every GPU "gpu": which one it is decides what the compiler is told, and which kernels run."""

from types import SimpleNamespace

import jax
import pytest

from kimi_jax.placement.compiler import platform_of


def device(platform: str, version: str, kind: str) -> SimpleNamespace:
    return SimpleNamespace(platform=platform, device_kind=kind, client=SimpleNamespace(platform_version=version))


@pytest.mark.parametrize(
    ("version", "kind", "platform"),
    [
        ("PJRT C API\nrocm 70200", "AMD Instinct MI355X", "rocm"),
        ("PJRT C API\ngfx950:sramecc+:xnack-", "gfx950:sramecc+:xnack-", "rocm"),
        ("PJRT C API\ncuda 13000", "NVIDIA H200", "cuda"),
    ],
)
def test_a_gpu_is_told_apart_by_what_its_driver_says(version, kind, platform):
    # Red when JAX's own name is taken: the options of ROCm would be dropped on a real machine.
    assert platform_of(device("gpu", version, kind)) == platform


def test_a_cpu_is_a_cpu():
    assert platform_of(jax.devices("cpu")[0]) == "cpu"
