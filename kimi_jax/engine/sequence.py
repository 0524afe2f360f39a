"""One request under way: its tokens, and what it holds of slots, pages and checkpoints."""

from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from kimi_jax.engine.request import DraftCounts, Request
from kimi_jax.media.prompt import Span, page_marks


@dataclass(eq=False)
class Sequence:
    """One request from its arrival to its end.

    Attributes:
      number: by order of arrival; a smaller one comes first wherever there is a choice.
      request: as asked.
      spans: where its images are.
      marks: for each page of the prompt, which images it holds parts of; empty without images.
      ids: prompt and drawn ids; after a preemption all of them are run again.
      drawn: how many of ``ids`` were drawn.
      hit: prompt tokens found in the prefix cache when it was first admitted; None before.
      group, slot: where it runs, the slot counted within the group; None while it waits.
      pages: its pages in order, shared ones first.
      position: tokens in the cache.
      goals: positions at which a checkpoint is to be kept, nearest first.
      saved: tokens before it -> checkpoint, until it is known that the scores there are finite.
      decoding: whether all of ``ids`` but the last drawn one are in, and that one is drawn.
      served: turn of its last prefill call.
      stride: most tokens by which a decode step lengthens it: 1 without drafts.
      drafts: what became of its drafts so far; None where it has none.
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
    stride: int = 1
    drafts: DraftCounts | None = None
    spans: tuple[Span, ...] = ()
    marks: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, number: int, request: Request, page: int, stride: int = 1) -> "Sequence":
        """A request that has just arrived, on programs with such a stride."""
        ids = [int(i) for i in request.ids]
        spans = tuple(Span(int(image.start), image.tokens, image.key) for image in request.images)
        marks = page_marks(spans, page, -(-len(ids) // page)) if spans else ()
        # whatever only the full sampler knows is decided one id at a time
        stride, counts = (1, None) if request.extras or stride == 1 else (stride, DraftCounts(0, (0,) * stride))
        return cls(number, request, ids, spans=spans, marks=tuple(marks), stride=stride, drafts=counts)

    @property
    def budget(self) -> int:
        """Ids that may still be drawn."""
        return self.request.max_tokens - self.drawn

    @property
    def end(self) -> int:
        """Tokens to be in before it decodes.

        After a preemption a sequence with drafts goes on from its last id, which is not in: the random numbers of a step belong to
        its anchor, so that every later step must begin where it would have begun.
        """
        return len(self.ids) - (self.stride > 1 and self.drawn > 0)

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
        end = self.goals[0] if self.goals else self.end
        return min(chunk, end - self.position)

    def after(self, steps: int) -> int:
        """Tokens that may be in after so many decode steps."""
        return self.position + min(steps * self.stride, self.budget)

    def sees(self, tokens: int) -> bool:
        """Whether there is a part of an image in its next tokens."""
        return any(span.start < self.position + tokens and self.position < span.end for span in self.spans)

    def common(self, other: "Sequence", page: int) -> int:
        """How many of its first tokens are those of another, images included; exact at ends of pages."""
        length = min(len(self.ids), len(other.ids))
        differ = np.flatnonzero(np.not_equal(self.ids[:length], other.ids[:length]))
        tokens = int(differ[0]) if differ.size else length
        marks = zip_longest(self.marks, other.marks, fillvalue=b"")
        seen = next((index * page for index, (mine, its) in enumerate(marks) if mine != its), tokens)
        return min(tokens, seen)


def goals(length: int, start: int, known: int, page: int, spacing: int) -> list[int]:
    """Where a prompt of ``length`` tokens that starts at ``start`` should leave checkpoints, nearest first.

    At its last page end, where a conversation goes on; at ``known``, where it parts from earlier prompts, since a start that came
    twice comes again; and every ``spacing`` tokens, so that what lies between costs about the memory of one checkpoint. Each
    may split a prefill call in two.
    """
    last = (length - 1) // page * page
    wanted = {last, known, *range(start // spacing * spacing + spacing, last, spacing)}
    return sorted(goal for goal in wanted if start < goal <= last)
