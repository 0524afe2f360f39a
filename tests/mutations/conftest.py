"""All tests here compile without LLVM's costly passes; the faults are far larger than rounding."""

import pytest

from tests.parity.light import light_compilation as light_compilation


@pytest.fixture(scope="module", autouse=True)
def _light(light_compilation):
    yield
