"""Sequences for draft training, and the batches that a step number makes of them.

A block is drafted behind an anchor, and many anchors of a sequence are trained at once. Batch ``step`` depends on the sequences,
the seed and ``step`` alone.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from kimi_jax.train.state import TrainingError

MOST_TOLD = 10
"""Problems of a data file that are listed."""


class Sample(NamedTuple):
    """A token sequence and how many of its tokens are prompt: those are context, but nothing is drafted there."""

    ids: tuple[int, ...]
    prompt: int = 0


class DraftBatch(NamedTuple):
    """What one update sees.

    Attributes:
      ids: token ids, 0 behind the end.
      lengths: tokens of each sequence.
      anchors: position of each anchor; drafted are the positions behind it.
      real: whether the token of each drafted position is there and counts.
    """

    ids: Int[Array, "rows tokens"]
    lengths: Int[Array, " rows"]
    anchors: Int[Array, "rows anchors"]
    real: Bool[Array, "rows anchors drafts"]


@dataclass(frozen=True)
class DraftBatches:
    """Batches of a fixed shape, a function of the step: every epoch is a new order of the sequences.

    Attributes:
      samples: sequences; what is longer than ``length`` is cut off.
      rows, length, anchors, drafts: sizes of a batch.
    """

    samples: Sequence[Sample]
    rows: int
    length: int
    anchors: int
    drafts: int
    seed: int

    def __call__(self, step: int) -> DraftBatch:
        random = np.random.default_rng([self.seed, 1, step])
        chosen = [self._sample(step * self.rows + row) for row in range(self.rows)]
        ids = np.zeros((self.rows, self.length), np.int32)
        anchors = np.ones((self.rows, self.anchors), np.int32)
        real = np.zeros((self.rows, self.anchors, self.drafts), bool)
        for row, sample in enumerate(chosen):
            held = sample.ids[: self.length]
            ids[row, : len(held)] = held
            # as in inference: an anchor was drawn itself, has context, and a token behind it
            places = np.arange(max(sample.prompt, 1), len(held) - 1)
            picked = np.sort(random.permutation(places)[: self.anchors])
            anchors[row, : len(picked)] = picked
            real[row, : len(picked)] = picked[:, None] + 1 + np.arange(self.drafts) < len(held)
        lengths = np.array([min(len(sample.ids), self.length) for sample in chosen], np.int32)
        return DraftBatch(ids, lengths, anchors, real)  # pyright: ignore[reportArgumentType]

    def _sample(self, number: int) -> Sample:
        epoch, place = divmod(number, len(self.samples))
        return self.samples[_order(self.seed, epoch, len(self.samples))[place]]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, 0, epoch]).permutation(count)


def digest(samples: Sequence[Sample]) -> str:
    """Of all ids and prompt lengths: equal digests, equal data."""
    text = json.dumps([[sample.prompt, *sample.ids] for sample in samples], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_samples(file: Path, samples: Sequence[Sample]) -> None:
    """One JSON object a line, as :func:`read_samples` reads them; the file is there whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"ids": sample.ids, "prompt": sample.prompt}) + "\n" for sample in samples)
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(file)


def read_samples(file: Path, vocab: int, encode: Callable[[str], list[int]] | None, least: int = 3) -> list[Sample]:
    """Sequences of a JSON list, or of JSON lines.

    Each is a list of ids, a text, or an object with ``ids`` or ``text`` and optionally ``prompt``: how many of its ids are prompt.

    Args:
      file: the data.
      vocab: ids must be below.
      encode: text -> ids; None where the model has no tokenizer.
      least: ids of a sequence; an anchor, a token before it and one behind it are 3.

    Raises:
      TrainingError: lists what cannot be read and every entry that cannot be used.
    """
    title = f"The data {file} cannot be used"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(title, [f"it cannot be read: {error}"]) from None
    entries, problems = _entries(text)
    samples = []
    for where, entry in entries:
        sample = _sample(entry, vocab, encode, least)
        if isinstance(sample, Sample):
            samples.append(sample)
        else:
            problems.append(f"{where}: {sample}")
    if not entries and not problems:
        problems.append("it holds no sequences")
    if problems:
        more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
        hint = "A sequence is a list of ids, a text, or an object with ids or text and optionally prompt."
        raise TrainingError(title, [*problems[:MOST_TOLD], *more], hint)
    return samples


def _entries(text: str) -> tuple[list[tuple[str, Any]], list[str]]:
    try:
        values = json.loads(text)
        if isinstance(values, list) and not all(type(value) is int for value in values):
            return [(f"entry {number}", value) for number, value in enumerate(values)], []
    except (ValueError, RecursionError):
        pass  # several values: lines
    entries, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entries.append((f"line {number}", json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    return entries, problems


def _sample(entry: Any, vocab: int, encode: Callable[[str], list[int]] | None, least: int) -> Sample | str:
    """The sequence of an entry, or why it has none."""
    prompt = 0
    if isinstance(entry, dict):
        unknown = entry.keys() - {"ids", "text", "prompt"}
        if unknown or ("ids" in entry) == ("text" in entry):
            return f"has the keys {sorted(entry)}; expected ids or text, and optionally prompt"
        prompt, entry = entry.get("prompt", 0), entry.get("ids", entry.get("text"))
    if isinstance(entry, str):
        if encode is None:
            return "is text, and the model has no tokenizer files; give ids"
        entry = encode(entry)
    if not isinstance(entry, list) or not all(type(number) is int and 0 <= number < vocab for number in entry):
        return f"is no list of ids from 0 to {vocab - 1}"
    if len(entry) < least:
        return f"has {len(entry)} ids; it must have {least} or more"
    if type(prompt) is not int or not 0 <= prompt < len(entry):
        return f"prompt = {prompt!r}; it must be an integer from 0 to {len(entry) - 1}"
    return Sample(tuple(entry), prompt)
