"""How much to think, as a caller names it and as the model is told (K3.1 Pro notes, section 12)."""

import pytest

from kimi_jax.prompts import PromptReader
from kimi_jax.text.errors import ChatError
from tests.text.data import TINY


def told(effort) -> str:
    ids = PromptReader(None, TINY, None).read("Hi", (), effort=effort).ids
    return TINY.decode(ids)


@pytest.mark.parametrize("asked, effort", [("low", "low"), ("medium", "high"), ("xhigh", "max"), ("max", "max")])
def test_efforts_have_the_meaning_that_requests_give_them(asked, effort):
    # red when medium or xhigh is refused, or told to the model, which was never trained on it
    assert f"`thinking_effort={effort}`" in told(asked)


def test_an_unknown_effort_is_refused():
    # red when it is passed on
    with pytest.raises(ChatError, match="huge"):
        told("huge")
