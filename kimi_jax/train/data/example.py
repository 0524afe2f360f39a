"""One conversation with a known right answer, and the two halves that all of them are split into."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, Split] = ("train", "held-out")

Pixels = UInt8[np.ndarray, "height width colours"]
Message = dict[str, Any]

ONE_IN = 4
"""One wording in so many is kept for the held-out half."""


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation whose last message is the assistant's.

    Attributes:
      task: which generator made it.
      messages: in the chat format; assistant messages carry ``reasoning_content``.
      answer: what the last message must say: a value for most tasks, the calls for tool calls.
      facts: the problem behind the words, from which the answer can be found again.
      images: pixels of the image parts, in the order of the messages.
      tools: declared to the model; empty for none.
      thinking: whether the assistant thinks.
      effort: ``low``, ``high``, ``max``, or None for no message about it.
    """

    task: str
    messages: tuple[Message, ...]
    answer: Any
    facts: Mapping[str, Any]
    images: tuple[Pixels, ...] = field(default=(), repr=False)
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    effort: str | None = "max"

    @property
    def prompt(self) -> list[Message]:
        """The conversation without the message that answers it."""
        return list(self.messages[:-1])

    @property
    def reply(self) -> Message:
        """The message that answers it."""
        return self.messages[-1]


@dataclass(frozen=True)
class Wording:
    """What a generator draws from, for one half of the data.

    Numbers and names are drawn freely in both halves; a template, or a combination of parts of one, belongs to one half.
    """

    chance: random.Random
    split: Split

    def template(self, *axes: Sequence[Any]) -> tuple[Any, ...]:
        """One entry of each axis; a combination is seen by one half only.

        With one axis, every fourth entry is held out as a whole. With more, every entry is trained, and every fourth combination
        is not: its words are known, how they meet is new.
        """
        indices = [self.chance.randrange(len(axis)) for axis in axes]
        # a neighbour on some axis until the combination belongs here: a few steps, as every fourth is held out
        while held_out(indices) != (self.split == "held-out"):
            at = self.chance.randrange(len(axes))
            indices[at] = (indices[at] + 1) % len(axes[at])
        return tuple(axis[at] for axis, at in zip(axes, indices, strict=True))

    def one(self, axis: Sequence[Any]) -> Any:
        """One entry of a single axis."""
        return self.template(axis)[0]


def held_out(indices: Sequence[int]) -> bool:
    """Whether the template with these places on its axes is kept from training."""
    return sum(at * axis for axis, at in enumerate(indices, start=1)) % ONE_IN == 3


def user(content: Any) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str, thoughts: str, calls: Sequence[Message] = ()) -> Message:
    """A message of the assistant."""
    message: Message = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    return message | ({"tool_calls": list(calls)} if calls else {})
