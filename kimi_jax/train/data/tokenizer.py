"""The tokenizer of kimi-nano, learned from its data: ``python -m kimi_jax.train.data.tokenizer --out FOLDER``."""

import argparse
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path

from kimi_jax.text.vocabulary import RESERVED
from kimi_jax.text.write_vocabulary import BYTES, write_vocabulary
from kimi_jax.train.data.bpe import counted_pieces, merges
from kimi_jax.train.data.encode import conversation
from kimi_jax.train.data.english import COMMON, TEXT
from kimi_jax.train.data.tasks import mixture
from kimi_jax.train.data.words import ADJECTIVES, CITIES, DAYS, HOLDERS, PEOPLE, THINGS, WORDS

SIZE = 2048
"""Entries in all, the 256 reserved ids included."""

SEED, EXAMPLES = 0, 3000

LEAST, MOST = 256 + RESERVED, 1 << 16


def write_tokenizer(folder: str | Path, size: int = SIZE) -> Path:
    """Learns the vocabulary and writes ``tiktoken.model`` and ``tokenizer_config.json``.

    Args:
      folder: made where missing.
      size: entries in all: a multiple of 8.

    Returns:
      The folder.

    Raises:
      ValueError: a size that does not work.
    """
    if size % 8 or not LEAST <= size <= MOST:
        raise ValueError(f"size is {size}; multiples of 8 from {LEAST} to {MOST:,} work")
    return write_vocabulary(folder, learned_tokens(size - RESERVED))


def learned_tokens(count: int) -> list[bytes]:
    """The ordinary tokens in the order of their ids: all bytes, then merges, then pairs of bytes where the merges run out."""
    tokens = [bytes([value]) for value in BYTES]
    known = set(tokens)
    filling = (bytes(pair) for pair in product(BYTES, repeat=2) if not any(48 <= value < 58 for value in pair))
    for token in chain(merges(counted_pieces(corpus())), filling):
        if len(tokens) == count:
            break
        if token not in known:
            known.add(token)
            tokens.append(token)
    return tokens


def corpus() -> Iterator[str]:
    """What the vocabulary is learned from: training examples, every word of the generators, and some English."""
    examples = mixture(seed=SEED)
    for index in range(EXAMPLES):
        yield from (segment.text for segment in conversation(examples(index)) if not segment.markers)
    words = sorted({*WORDS, *ADJECTIVES, *CITIES, *DAYS, *HOLDERS, *PEOPLE, *THINGS})
    for word in words:
        yield from [f" {word}", word] * 40  # a token each, whatever the mixture makes of them
    yield from COMMON.split() * 2
    yield from (f" {word}" for word in COMMON.split() * 4)
    yield TEXT


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kimi_jax.train.data.tokenizer", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the two files go")
    parser.add_argument(
        "--size", type=int, default=SIZE, help=f"ids in all, 256 reserved ones included (default: {SIZE})"
    )
    args = parser.parse_args()
    try:
        print(write_tokenizer(args.out, args.size))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
