"""All tests here compile without LLVM's costly passes: the same program of XLA in half the time, and exactness is not at stake."""

import pytest

from tests.parity.light import light_compilation as light_compilation


@pytest.fixture(scope="module", autouse=True)
def _light(light_compilation):
    yield
