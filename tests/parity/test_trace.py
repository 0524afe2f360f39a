"""Every intermediate value of prompt 3 against the float64 trace: a fault is found where it is made, not at the logits."""

import numpy as np
import pytest

from kimi_jax.cache import KdaCache
from tests.parity import trace
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TOLERANCE, assert_logits, golden, logits, prompt

NAMES = sorted(name for name in golden() if name.startswith("trace/"))
PLACES = sorted({name.split("/")[1] for name in NAMES}, key=lambda place: (len(place), place))


@pytest.fixture(scope="module")
def seen(light_compilation) -> dict[str, np.ndarray]:
    recorder = trace.Recorder()
    with trace.compiled_ops() as patch:
        recorder.watch(patch)
        scores, hidden, _ = trace.forward(prompt(3))
    assert_logits(scores, logits(3))
    return {**recorder.values, "trace/final": hidden}


def test_everything_in_the_trace_is_seen(seen):
    # red when a site of the model is not called, or one is called that the golden model does not have
    assert sorted(seen) == NAMES


@pytest.mark.parametrize("place", PLACES)
def test_values(seen, place):
    # red for the mutations of tests/mutations, first in the layer where they are made
    errors = {name: error(seen[name], golden()[name]) for name in NAMES if name.split("/")[1] == place}
    assert not {name: found for name, found in errors.items() if found > TOLERANCE}


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference; of integers none is allowed."""
    if got.shape != expected.shape or expected.dtype == np.int32:
        return 0.0 if np.array_equal(got, expected) else np.inf
    return float(np.abs(got - expected).max())


@pytest.mark.slow
def test_token_by_token_leaves_the_same_states(seen):
    # red when a call does not take up every state where the call before left it
    with trace.compiled_ops():
        scores, _, cache = trace.forward(prompt(3), cuts=range(1, 7))
    assert_logits(scores, logits(3))
    for index, entry in enumerate(cache):
        state = entry.state if isinstance(entry, KdaCache) else entry.latent
        np.testing.assert_allclose(state[0], seen[f"trace/layer{index}/state"], rtol=0, atol=TOLERANCE)
