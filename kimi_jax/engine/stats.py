"""What an engine says about itself."""

from dataclasses import dataclass

from kimi_jax.engine.request import DraftCounts


class EngineFull(Exception):
    """The queue is full; nothing of the request was kept.

    Attributes:
      retry_after: seconds after which a place is likely, from the rate at which requests ended lately; 1 to 60.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"{waiting} requests wait and the queue takes no more; try again in {retry_after:.0f} s")


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment; totals are since the engine was built.

    Attributes:
      queued: requests that wait for a slot.
      running: requests that hold a slot.
      slots: all slots.
      pages: all pages.
      pages_used: pages of running requests.
      pages_kept: further pages, kept for prefix hits only and given up when needed.
      checkpoints: all recurrent checkpoints.
      checkpoints_used: of them, those that hold a state.
      prompt_tokens: tokens of admitted prompts, hits included.
      hit_tokens: of them, those found in the prefix cache.
      drawn_tokens: ids drawn.
      preemptions: times that a request gave its slot back before its end.
      turns: calls of :meth:`Engine.turn` that did something.
      drafts: what became of all drafts; None without a draft.
    """

    queued: int
    running: int
    slots: int
    pages: int
    pages_used: int
    pages_kept: int
    checkpoints: int
    checkpoints_used: int
    prompt_tokens: int
    hit_tokens: int
    drawn_tokens: int
    preemptions: int
    turns: int
    drafts: DraftCounts | None = None
