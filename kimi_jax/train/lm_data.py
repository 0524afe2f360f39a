"""Where the sequences of a language model come from: a file of ids, or kimi-nano's generators."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from kimi_jax.train.packing import Sequence
from kimi_jax.train.state import TrainingError

PART = 1 << 32
"""Examples between the beginnings of two parts of a run: more than any part draws."""


def read(file: Path, vocab: int) -> list[Sequence]:
    """Sequences of a file of JSON lines: ``ids``, and ``mask`` (1 for those that are learnt; all where it is missing).

    Raises:
      TrainingError: the file cannot be read, or lines that hold no such sequence; names the first of them.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError("The data cannot be read", [f"{file}: {error}"]) from None
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            held = json.loads(line)
            ids = np.asarray(held["ids"], np.int32)
            mask = np.asarray(held.get("mask", [1] * len(ids)), bool)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            problems.append(f"line {number}: expected an object with ids and mask")
            continue
        if ids.ndim != 1 or mask.shape != ids.shape or len(ids) < 2:
            problems.append(f"line {number}: {ids.shape} ids and {mask.shape} in mask; two or more of both are needed")
        elif ids.min() < 0 or ids.max() >= vocab:
            problems.append(f"line {number}: ids lie in {ids.min()}..{ids.max()}; the vocabulary has {vocab}")
        else:
            found.append((ids, mask))
    if problems or not found:
        raise TrainingError(f"{file} cannot be trained on", problems[:5] or ["it holds no sequence"])
    return found


def nano(folder: Path, vocab: int, seed: int) -> Callable[[int], Iterator[Sequence]]:
    """kimi-nano's training half, text tasks only, written with the tokenizer of a folder.

    Raises:
      TrainingError: the tokenizer has more ids than the model.
    """
    from kimi_jax.text.tokenizer import Tokenizer
    from kimi_jax.train.data.encode import encode
    from kimi_jax.train.data.tasks import PICTURES, WEIGHTS, mixture

    tokenizer = Tokenizer.from_folder(folder)
    stream = mixture({name: weight for name, weight in WEIGHTS.items() if name not in PICTURES}, seed)

    def draw(part: int) -> Iterator[Sequence]:
        for index in count(part * PART):
            ids, mask = encode(stream(index), tokenizer)
            if ids.max() >= vocab:
                raise TrainingError("The tokenizer does not fit the model", [f"id {ids.max()}; vocabulary {vocab}"])
            yield ids, mask

    return draw
