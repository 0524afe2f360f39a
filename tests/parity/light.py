"""Fast compilation for tests of what a program does rather than of its last digits."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def light_compilation() -> Iterator[None]:
    """Leaves out LLVM's costly passes: the same HLO in about half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
