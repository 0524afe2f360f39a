"""The whole model with every op as a kernel, run step by step by Pallas: the goldens hold through them as through XLA."""

import numpy as np
import pytest

from kimi_jax.engine.request import Request
from tests.parity import k31
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import assert_logits, logits, prompt, tiny
from tests.parity.quick import answers, ids, quick


@pytest.mark.slow
def test_scores_and_an_answer_of_the_quick_model(light_compilation):
    # Red when a layer hands a kernel another array than its reference, or a kernel writes a cache elsewhere.
    kernels, xla = quick(impl="interpret"), quick()
    np.testing.assert_allclose(kernels.logits(ids(20)), xla.logits(ids(20)), rtol=0, atol=1e-4)
    request = Request(ids(3), max_tokens=5)
    assert answers(kernels.runner, [request]) == answers(xla.runner, [request])


@pytest.mark.slow
def test_golden_scores():
    # Red as above, for the kinds of layers and blocks that the quick model lacks.
    assert_logits(tiny(impl="interpret", prefill_chunk=32).logits(prompt(3)), logits(3))


@pytest.mark.slow
def test_goldens_under_a_layout():
    # Red when a kernel takes a shard for the whole.
    assert_logits(tiny("tp8-lean", impl="interpret", prefill_chunk=32).logits(prompt(3)), logits(3))


@pytest.mark.slow
def test_golden_scores_of_a_sparse_model(light_compilation):
    # Red as above, and when a kernel chooses other positions, or attends to others than those chosen.
    assert_logits(k31.tiny(impl="interpret").logits(k31.prompt(5)), k31.logits(5))
