"""One request under way: its tokens, and what it holds of slots, pages and checkpoints."""

from dataclasses import dataclass, field

from kimi_jax.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """One request from its arrival to its end.

    Attributes:
      number: by order of arrival; a smaller one comes first wherever there is a choice.
      request: as asked.
      ids: prompt and drawn ids; after a preemption all of them are run again.
      drawn: how many of ``ids`` were drawn.
      hit: prompt tokens found in the prefix cache when it was first admitted; None before.
      group, slot: where it runs, the slot counted within the group; None while it waits.
      pages: its pages in order, shared ones first.
      position: tokens in the cache.
      goals: positions at which a checkpoint is to be kept, nearest first.
      saved: tokens before it -> checkpoint, until it is known that the scores there are finite.
      decoding: whether all of ``ids`` but the last drawn one are in.
      served: turn of its last prefill call.
      behind: a running prompt that will leave a longer start for this one, and ``until`` where; None where there is none.
    """

    number: int
    request: Request
    ids: list[int]
    drawn: int = 0
    hit: int | None = None
    group: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    position: int = 0
    goals: list[int] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    decoding: bool = False
    served: int = 0
    behind: "Sequence | None" = None
    until: int = 0

    @property
    def budget(self) -> int:
        """Ids that may still be drawn."""
        return self.request.max_tokens - self.drawn

    @property
    def place(self) -> int:
        """The slot of a running request."""
        assert self.slot is not None
        return self.slot

    @property
    def prefilling(self) -> bool:
        return self.slot is not None and not self.decoding

    def piece(self, chunk: int) -> int:
        """Tokens of its next prefill call: up to the chunk, the next goal, or the end."""
        end = self.goals[0] if self.goals else len(self.ids)
        return min(chunk, end - self.position)


def goals(length: int, start: int, known: int, page: int, spacing: int) -> list[int]:
    """Where a prompt of ``length`` tokens that starts at ``start`` should leave checkpoints, nearest first.

    At its last page end, where a conversation goes on; at ``known``, where it parts from earlier prompts, since a start that came
    twice comes again; and every ``spacing`` tokens, so that what lies between costs about the memory of one checkpoint. Each
    may split a prefill call in two.
    """
    last = (length - 1) // page * page
    wanted = {last, known, *range(start // spacing * spacing + spacing, last, spacing)}
    return sorted(goal for goal in wanted if start < goal <= last)
