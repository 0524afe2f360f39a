"""Memory that a call of the vision tower takes beside weights and running state, for as long as it runs."""

from collections.abc import Iterator

from kimi_jax.planning.ask import Ask
from kimi_jax.vision_steps import BUCKETS, call_bytes

TYPICAL = 8192
"""Patches of a picture of about 1500 by 1000 pixels."""


def vision_notes(ask: Ask) -> Iterator[str]:
    """What a plan with vision says of calls with images."""
    if ask.vision == "off" or ask.config.vision is None:
        return
    usual, most = (call_bytes(ask.config.vision, ask.placed, patches) / 2**30 for patches in (TYPICAL, BUCKETS[-1]))
    yield (
        f"a call with images takes about {usual:.2f} GiB more for {TYPICAL:,} patches while it runs, "
        f"{most:.2f} GiB for the largest image"
    )
