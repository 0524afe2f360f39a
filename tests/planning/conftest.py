"""Plans that several files look at; the declared trees behind them are built once."""

import pytest

import kimi_jax

LIMIT = 1 << 20


@pytest.fixture(scope="session")
def published():
    """Kimi-K3 as AMD published it: TP8, one sequence of the model's limit, one-byte latent rows."""
    return kimi_jax.plan("k3", "tp8", "mi355x", LIMIT)


@pytest.fixture(scope="session")
def pro():
    """K3.1 Pro on the same layout."""
    return kimi_jax.plan("k3.1-pro", "tp8", "mi355x", LIMIT)
