"""Every known way to get the sparse indexer wrong is planted once, and the golden logits of k31-tiny must notice."""

import numpy as np
import pytest

from tests.mutations.indexer import FAULTS, RIGHT, SEVERAL
from tests.mutations.plant import Plant, Site
from tests.parity import k31, trace
from tests.parity.models import TOLERANCE

pytestmark = pytest.mark.slow

VISIBLE = 1e-3
"""Ten times what the parity tests accept."""

PROMPT = 6
"""Of 96 tokens, 8 of which are kept."""


def error(plant: Plant | None = None, cuts: tuple[int, ...] = ()) -> float:
    """Largest logit error of the golden prompt with a fault planted; infinite where something is not finite."""
    with k31.step_by_step() as patch:
        site = Site(patch, dict(k31.parameters()), k31.tiny(experts="packed").config, cuts)
        if plant:
            plant(site)
        scores, *_ = trace.forward(k31.prompt(PROMPT), site.cuts, site.params, site.sizes)
    found = np.abs(scores - k31.logits(PROMPT)).max()
    return float(found) if np.isfinite(found) else float("inf")


@pytest.mark.parametrize("cuts", [(), SEVERAL], ids=["one call", "several"])
def test_without_a_fault(cuts):
    # red when the run itself is off, which would make every fault below look caught
    assert error(cuts=cuts) < TOLERANCE


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_no_fault(name):
    # red when a stand-in is wrong before any switch is thrown, or a common positive factor of the scores matters
    assert error(RIGHT[name]) < TOLERANCE


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name):
    # red when a change of the data or of the model stops this fault from showing
    assert error(FAULTS[name]) > VISIBLE
