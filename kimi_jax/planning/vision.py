"""Memory that a call of the vision tower takes beside weights and running state, for as long as it runs."""

from collections.abc import Iterator

from kimi_jax.config import VisionConfig
from kimi_jax.placement.layout import Layout
from kimi_jax.planning.ask import Ask
from kimi_jax.vision_steps import BLOCK, BUCKETS

TYPICAL = 8192
"""Patches of a picture of about 1500 by 1000 pixels."""


def call_bytes(vision: VisionConfig, layout: Layout, patches: int, block: int = BLOCK) -> int:
    """Scratch of one call on one device in bfloat16, within a twentieth of what XLA takes on gfx950 from 4,096 patches on.

    Counted as alive together: q, k and v and the MLP's inner width as float32 products, as float32 results and rounded; the
    residual stream beside its float32 norm; the float32 scores of two blocks.

    Args:
      patches: of the pack's bucket.
      block: patches that meet in attention at a time.
    """
    heads, wide = layout.parts("vision_heads"), layout.parts("vision_ffn")
    inner = 3 * vision.qkv_width // heads + vision.mlp_width // wide
    return patches * (10 * inner + 6 * vision.hidden) + 8 * vision.heads // heads * min(block, patches) ** 2


def vision_notes(ask: Ask) -> Iterator[str]:
    """What a plan with vision says of calls with images."""
    if ask.vision == "off" or ask.config.vision is None:
        return
    usual, most = (call_bytes(ask.config.vision, ask.placed, patches) / 2**30 for patches in (TYPICAL, BUCKETS[-1]))
    yield (
        f"a call with images takes about {usual:.2f} GiB more for {TYPICAL:,} patches while it runs, "
        f"{most:.2f} GiB for the largest image"
    )
