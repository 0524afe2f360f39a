"""What every test can count on: eight CPU devices, one hypothesis profile, the golden data."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

FIXTURES = Path(__file__).parent / "fixtures"

# JAX fixes its devices at the first array. Not by the environment, which commands run by a test would inherit.
jax.config.update("jax_num_cpu_devices", 8)
if not jax.config.jax_platforms:
    jax.config.update("jax_platforms", "cpu")

# No deadline: the first example of a test compiles. Under CI the same examples every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("automatic", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("automatic" if os.environ.get("CI") else "local")


MOST_MAPPED = 8_192
"""Mapped regions of a test process from which compiled programs are dropped; Linux ends it at 65,530."""


@pytest.fixture(scope="module", autouse=True)
def _programs_do_not_pile_up() -> Iterator[None]:
    """Every compiled CPU program keeps several regions mapped, and a run of all tests compiles tens of thousands."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPED:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of the golden data."""
    return FIXTURES


@pytest.fixture(scope="session")
def k3_tiny() -> Path:
    """A tiny Kimi-K3 checkpoint in Hugging Face layout; its README says what is in it."""
    return FIXTURES / "k3-tiny"


@pytest.fixture(scope="session")
def k3_golden(k3_tiny: Path) -> dict[str, np.ndarray]:
    """What that checkpoint computes, by array name ("prompt3/logits"): from an independent float64 oracle."""
    with np.load(k3_tiny / "golden.npz") as arrays:
        return dict(arrays)
