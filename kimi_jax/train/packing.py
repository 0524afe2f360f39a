"""Batches of whole sequences: rows of one length in a batch, a few lengths in all, and as many rows as keep the tokens even.

A sequence has a row of its own, so nothing leaks from one into another: neither a recurrent state nor a window of a convolution
nor attention. Short sequences go into short rows, many of them, which costs less than long rows that hold several.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kimi_jax.train.state import TrainingError

Sequence = tuple[np.ndarray, np.ndarray]
"""Ids [tokens] int32 and, for each, whether the model is to learn to write it [tokens] bool."""


class Batch(NamedTuple):
    """Rows of one step.

    Attributes:
      ids: [rows, tokens] int32 inputs; padding comes last.
      targets: [rows, tokens] int32, the id after each.
      weights: [rows, tokens] float32, 0 where the target is not learnt.
      lengths: [rows] int32, inputs of each row.
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Buckets:
    """The shapes that batches may have.

    Attributes:
      lengths: of rows, ascending; a sequence goes into the shortest that holds it.
      tokens: of a batch, about; rows are a multiple of ``multiple``.
      multiple: devices that rows are dealt over.
    """

    lengths: tuple[int, ...]
    tokens: int
    multiple: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            problems.append(f"lengths {self.lengths}: they must ascend from 1 or more")
        elif self.tokens < self.lengths[-1]:
            problems.append(f"tokens = {self.tokens}: a batch must hold a row of {self.lengths[-1]}")
        if problems:
            raise TrainingError("These batches cannot be made", problems)

    def rows(self, length: int) -> int:
        """Rows of a batch of this length."""
        return max(self.tokens // (length * self.multiple), 1) * self.multiple

    def of(self, sequence: Sequence) -> int | None:
        """The length of the row that a sequence goes into; None where it is too long."""
        inputs = len(sequence[0]) - 1
        return next((length for length in self.lengths if inputs <= length), None)


class Packed:
    """Batches as a function of the step, out of an endless stream of sequences per part of the run.

    A part is ``PART`` steps: its sequences are drawn from ``draw(part)`` until so many batches are full, which is why any step can
    be asked for without those before its part.
    """

    PART = 64
    """Steps that are packed together: rows that fill no batch of a part are left out."""

    def __init__(self, draw: Callable[[int], Iterator[Sequence]], buckets: Buckets, seed: int) -> None:
        self._draw, self._buckets, self._seed = draw, buckets, seed
        self._held: tuple[int, list[Batch]] | None = None

    def __call__(self, step: int) -> Batch:
        """The batch of a step.

        Raises:
          TrainingError: the stream ended, or holds nothing that fits a row.
        """
        part = step // self.PART
        if self._held is None or self._held[0] != part:
            self._held = part, self._fill(part)
        return self._held[1][step % self.PART]

    def _fill(self, part: int) -> list[Batch]:
        waiting: dict[int, list[Sequence]] = {length: [] for length in self._buckets.lengths}
        full: list[Batch] = []
        for drawn, sequence in enumerate(self._draw(part)):
            length = self._buckets.of(sequence)
            if length is not None:
                rows = waiting[length]
                rows.append(sequence)
                if len(rows) == self._buckets.rows(length):
                    full.append(batch(rows, length))
                    rows.clear()
            if len(full) == self.PART:
                order = np.random.default_rng([self._seed, part]).permutation(self.PART)
                return [full[place] for place in order]
            if drawn >= 1000 and not full and not any(waiting.values()):
                break
        raise TrainingError(
            "The data does not fill a batch",
            [f"part {part} gave {len(full)} of {self.PART} batches"],
            f"Rows hold up to {self._buckets.lengths[-1]} tokens; give longer rows or more data.",
        )


def batch(sequences: list[Sequence], length: int) -> Batch:
    """Rows of ``length`` inputs; every id but the last is an input, every one but the first a target."""
    shape = len(sequences), length
    ids, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights, lengths = np.zeros(shape, np.float32), np.zeros(len(sequences), np.int32)
    for row, (tokens, learnt) in enumerate(sequences):
        count = lengths[row] = len(tokens) - 1
        ids[row, :count], targets[row, :count] = tokens[:-1], tokens[1:]
        weights[row, :count] = learnt[1:]
    return Batch(ids, targets, weights, lengths)


def from_list(sequences: Iterable[Sequence], seed: int) -> Callable[[int], Iterator[Sequence]]:
    """An endless stream of a data set, in another order for every part of a run."""
    held = list(sequences)

    def draw(part: int) -> Iterator[Sequence]:
        random = np.random.default_rng([seed, part])
        while held:
            for place in random.permutation(len(held)):
                yield held[place]

    return draw
