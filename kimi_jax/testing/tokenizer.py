"""A small tokenizer in the released file format, learned from the text below. The same files on every machine."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise, product
from pathlib import Path

from kimi_jax.text.vocabulary import RESERVED
from kimi_jax.text.write_vocabulary import BYTES, write_vocabulary

_WORDS = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""Close to what the tokenizer never merges across; the standard library cannot express it in full."""

_TEXT = """
A chat turn is a message with a role: system, user, assistant or tool. The assistant may think first, then it
gives its response, and it may call tools; every call has a name, an index and arguments, and every argument has
a key, a type and a value: string, number, boolean, null, object or array. The `thinking_effort` guides on how
much to think in your thinking channel (not including the response channel), supported values include `low`,
`medium`, `high`, and `max`. Now the system is invoked with `thinking_effort=max`. Here are the available tools,
described in JSONSchema. Your response must be raw JSON data without markdown code blocks.
{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":
{"city":{"type":"string","description":"City
name"},"days":{"type":"integer","minimum":1}},"required":["city"]}}}

The harbour lay quiet under a low sky. Two boats were missing, and the keeper of the light had written their
names in the margin of his book, as he did whenever a crew stayed out over night. His daughter counted the lamps
along the pier: one, two, three, and then the gap where the storm had taken the fourth. "They will come with the
tide," she said. "They always have." The old man did not answer. He had learned that the sea keeps no promises,
but that it returns most of what it borrows, and that waiting is a kind of work which nobody pays for. When the
first sail showed behind the rocks he put the pen down.

What does the model see? Words, pieces of words, single letters and bytes. It's not that it can't spell; it
doesn't need to. We'll write a few numbers: 0, 1, 2, 3, 10, 42, 100, 128, 256, 640x480, 1024, 3.14159, 2024, and
some code:

    def add(first: int, second: int) -> int:
        total = first + second
        return total

    for item in range(10):
        if item % 2 == 0:
            print("even", item)
        else:
            print("odd", item)

Die Katze schläft auf dem Dach. Le café est fermé aujourd'hui. El niño comió una manzana.
Привет, как дела? こんにちは、世界。
你好世界。今天天气很好。我们一起学习语言模型。你好吗。我很好。谢谢。
"""


def write_tiny_tokenizer(folder: str | Path, size: int = 1024) -> Path:
    """Write ``tiktoken.model`` and ``tokenizer_config.json`` into a folder, made if need be, and return the folder.

    Args:
      folder: where to write.
      size: entries in all, the 256 reserved ids included: a multiple of 8, at least 512. The base tokens are the
        single bytes, then merges learned from the module's text, then byte pairs and triples to fill up.

    Raises:
      ValueError: a size that does not work.
    """
    if size % 8 or not 256 + RESERVED <= size <= 1 << 20:
        raise ValueError(f"size is {size}; multiples of 8 from {256 + RESERVED} to {1 << 20} work")
    return write_vocabulary(folder, base_tokens(size - RESERVED))


@cache
def base_tokens(count: int) -> tuple[bytes, ...]:
    """The ordinary tokens in the order of their ids."""
    tokens = [bytes([value]) for value in BYTES]
    filling = (bytes(value) for value in chain(product(BYTES, repeat=2), product(BYTES, repeat=3)))
    known = set(tokens)
    for token in chain(_merges(), filling):
        if len(tokens) == count:
            break
        if token not in known:
            known.add(token)
            tokens.append(token)
    return tuple(tokens)


def _merges() -> Iterator[bytes]:
    """Byte pair encoding: the pair seen most often is merged next; of equals the one that sorts first."""
    words = Counter(_WORDS.findall(_TEXT))
    parts = {word: [bytes([value]) for value in word.encode()] for word in words}
    while True:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(parts[word]):
                pairs[pair] += count
        if not pairs:
            return
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        yield best[0] + best[1]
        parts = {word: _merged(pieces, best) for word, pieces in parts.items()}


def _merged(pieces: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
