"""Text to token ids and back, with the released vocabulary. Source: chat-format, sections 1 and 2."""

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import tiktoken

from kimi_jax.text.markup import END
from kimi_jax.text.vocabulary import Vocabulary, generated_name, read_vocabulary

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What is never merged across; ``&&`` is the intersection of character classes."""

SLICE, RUN = 400_000, 25_000
"""Longest text, and longest run with or without white space, that is encoded at once, in characters."""

_RUNS = re.compile(r"\S+|\s+")


class EncodeError(ValueError):
    """A string that is not Unicode text."""


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
      vocab_size: ordinary tokens and the 256 reserved ids.
      ranks: bytes of each ordinary token -> its id.
      special_ids: name -> id of all reserved ids, generated names included.
      stop_ids: ids that end generation. The first is the end of a message; the others are there for safety.
      unnamed_ids: reserved ids without a name of their own.
      banned_ids: ids that must never be sampled: the unnamed ones and padding.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        base = len(vocabulary.ranks)
        self.vocab_size = vocabulary.size
        self.ranks = vocabulary.ranks
        self.special_ids = vocabulary.special_ids()
        self.stop_ids = tuple(self.special_ids[name] for name in (END, "[EOS]", "[EOT]") if name in self.special_ids)
        self.unnamed_ids = vocabulary.unnamed
        self.banned_ids = self.unnamed_ids | {self.special_ids[name] for name in ("[PAD]",) if name in self.special_ids}
        self._bytes = [b""] * vocabulary.size
        for token, number in vocabulary.ranks.items():
            self._bytes[number] = token
        for name, number in self.special_ids.items():
            self._bytes[number] = name.encode()
        self._control_from = base
        names = sorted(self.special_ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)))
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=vocabulary.ranks, special_tokens=self.special_ids
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tiktoken.model`` and ``tokenizer_config.json``.

        Raises:
          TokenizerMissing: the folder has no tiktoken file.
          TokenizerError: the files are there and wrong; every problem at once.
        """
        return cls(read_vocabulary(folder))

    def encode(self, text: str, markers: bool = False, most: int | None = None) -> list[int]:
        """The ids of a text.

        Args:
          text: any Unicode text.
          markers: whether the names of reserved ids become those ids. Never for text that the renderer did not write.
          most: ids that are wanted: with more than that, the rest of the text may be left out.

        Raises:
          EncodeError: half a surrogate pair in the text.
        """
        _check_unicode(text)
        ids: list[int] = []
        for some in self._marked(text) if markers else self._plain(text):
            ids += some
            if most is not None and len(ids) > most:
                break
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]], most: int | None = None) -> list[int]:
        """The ids of (text, markers) pairs, each encoded by itself; ``most`` as in :meth:`encode`."""
        ids: list[int] = []
        for text, markers in segments:
            ids += self.encode(text, markers, None if most is None else most - len(ids))
            if most is not None and len(ids) > most:
                break
        return ids

    def _plain(self, text: str) -> Iterator[list[int]]:
        return map(self._encoding.encode_ordinary, pieces(text))

    def _marked(self, text: str) -> Iterator[list[int]]:
        """Names are found first: a piece must not end inside one, as it would in the long run of a large image's places."""
        done = 0
        for name in self._names.finditer(text):
            yield from self._plain(text[done : name.start()])
            yield [self.special_ids[name[0]]]
            done = name.end()
        yield from self._plain(text[done:])

    def decode(self, ids: Iterable[int], skip: Collection[int] = ()) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Ids in ``skip`` are left out."""
        return b"".join(self.token_bytes(number) for number in ids if number not in skip).decode(errors="replace")

    def token_bytes(self, number: int) -> bytes:
        """The bytes of one token; a reserved id has those of its name. Raises ValueError outside the vocabulary."""
        if not 0 <= number < self.vocab_size:
            raise ValueError(f"token id {number} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}")
        return self._bytes[number]

    def is_special(self, number: int) -> bool:
        return self._control_from <= number < self.vocab_size

    def special_id(self, name: str) -> int:
        """The id of a reserved name. Raises KeyError with the names that exist."""
        if name not in self.special_ids:
            named = sorted(known for known, number in self.special_ids.items() if number not in self.unnamed_ids)
            raise KeyError(
                f"this vocabulary does not name {name}; it names {', '.join(named)}, and {generated_name(0)} style"
            )
        return self.special_ids[name]


def pieces(text: str) -> Iterator[str]:
    """The parts of a text that are encoded one by one: cut every `SLICE` characters, and every `RUN` within a run.

    The cuts change ids, so they are part of the format.
    """
    for start in range(0, len(text), SLICE):
        part = text[start : start + SLICE]
        cuts = [0, *_run_cuts(part), len(part)] if len(part) > RUN else [0, len(part)]
        for begin, end in pairwise(cuts):
            yield part[begin:end]


def _run_cuts(text: str) -> Iterator[int]:
    for run in _RUNS.finditer(text):
        yield from range(run.start() + RUN, run.end(), RUN)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise EncodeError(
            f"U+{code:04X} at character {error.start} is half a surrogate pair, not a character"
        ) from None
