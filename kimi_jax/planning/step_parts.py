"""The part of a step that a compiled instruction belongs to, by the layer that wrote it."""

from kimi_jax.placement.hlo import Frame

PARTS = (
    ("Kda.", "kda"),
    ("Mla.", "mla"),
    ("LatentMoe.", "moe"),
    ("DecoderLayer._feed_forward", "dense"),
    ("enter", "attn_res"),
    ("RmsNorm.", "norm"),
    ("Embedding.", "embedding"),
    ("KimiModel.logits", "head"),
    ("sample", "draw"),
)
"""Start of a function's name -> the part of everything that it calls; the first match counts."""


def part_of_step(frames: tuple[Frame, ...]) -> str:
    """The part, or "" where none of the calls belongs to one."""
    called = [frame.function for frame in frames]
    return next((part for start, part in PARTS if any(name.startswith(start) for name in called)), "")
