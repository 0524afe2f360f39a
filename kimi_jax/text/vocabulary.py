"""The two released tokenizer files, read and fully checked. Source: chat-format, sections 1 and 2."""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_jax.problems import ProblemsError
from kimi_jax.text.markup import CLOSE, END, OPEN, SEP

RESERVED = 256
"""Ids after the ordinary tokens, named or not."""

MODEL_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"

_MODEL_LIMIT, _CONFIG_LIMIT = 64 << 20, 8 << 20  # bytes; the released files have 2.8 MB and less than 0.1 MB
_LARGEST_RANK = 1 << 22
_SHOWN_PROBLEMS = 12
_REQUIRED = (END, OPEN, CLOSE, SEP)


class TokenizerMissing(FileNotFoundError):
    """A folder without a tokenizer: its model works with token ids only."""


class TokenizerError(ProblemsError):
    """Tokenizer files that cannot be used; lists what is wrong with them."""


@dataclass(frozen=True)
class Vocabulary:
    """Ordinary tokens and the names of the reserved ids.

    Attributes:
      ranks: bytes of each ordinary token -> its id, which is also its merge rank; ids from 0 without a gap.
      named: reserved id -> name, for those that the config names.
    """

    ranks: dict[bytes, int]
    named: dict[int, str]

    @property
    def size(self) -> int:
        return len(self.ranks) + RESERVED

    @property
    def unnamed(self) -> frozenset[int]:
        """Reserved ids without a name of their own."""
        return frozenset(range(len(self.ranks), self.size)) - self.named.keys()

    def special_ids(self) -> dict[str, int]:
        """All reserved names -> ids, the generated names of the unnamed ones included."""
        generated = {generated_name(number): number for number in sorted(self.unnamed)}
        return {**{name: number for number, name in self.named.items()}, **generated}


@dataclass
class _Problems:
    """The first few problems and a count of the rest: a damaged file can have one in every line."""

    lines: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, line: str) -> None:
        if len(self.lines) < _SHOWN_PROBLEMS:
            self.lines.append(line)
        else:
            self.more += 1

    def all(self) -> list[str]:
        return [*self.lines, f"and {self.more} more like these"] if self.more else self.lines


def generated_name(number: int) -> str:
    """The name of a reserved id that the config does not name."""
    return f"<|reserved_token_{number}|>"


def read_vocabulary(folder: str | Path) -> Vocabulary:
    """The vocabulary of a model folder.

    Raises:
      TokenizerMissing: the folder has no tiktoken file.
      TokenizerError: the files are there and wrong.
    """
    model, config = Path(folder) / MODEL_FILE, Path(folder) / CONFIG_FILE
    if not os.path.lexists(model):  # a broken link is a broken tokenizer, not a missing one
        raise TokenizerMissing(
            f"{folder} has no {MODEL_FILE}, so text cannot be encoded or decoded; token ids work. "
            f"Copy {MODEL_FILE} and {CONFIG_FILE} of the released model into the folder to use text."
        )
    problems = _Problems()
    ranks = _ranks(_contents(model, _MODEL_LIMIT, problems), problems)
    named = _names(_contents(config, _CONFIG_LIMIT, problems), len(ranks), problems)
    if problems.lines:
        raise TokenizerError(
            f"The tokenizer in {folder} cannot be used",
            problems.all(),
            "Files as released work: one 'BASE64 RANK' a line; added_tokens_decoder with the names of reserved ids.",
        )
    return Vocabulary(ranks, named)


def _contents(path: Path, limit: int, problems: _Problems) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        problems.add(f"{path.name} is missing")
        return None
    if len(content) > limit:
        problems.add(f"{path.name} is larger than {limit} bytes")
        return None
    return content


def _ranks(content: bytes | None, problems: _Problems) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    if content is None:
        return ranks
    lines: dict[int, int] = {}  # rank -> line that gave it
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{MODEL_FILE} line {number}"
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2:
            problems.add(f"{where} has {len(fields)} fields instead of 2")
            continue
        token, rank = _token(fields[0]), _rank(fields[1])
        if not token:
            problems.add(f"{where}: {_excerpt(fields[0])} is not the base64 of a token")
        if rank is None:
            problems.add(f"{where}: {_excerpt(fields[1])} is not a rank; ranks go from 0 to {_LARGEST_RANK}")
        if not token or rank is None:
            continue
        if token in ranks:
            problems.add(f"{where} repeats the token of line {lines[ranks[token]]} ({_excerpt(token)})")
        elif rank in lines:
            problems.add(f"{where} repeats rank {rank} of line {lines[rank]}")
        else:
            ranks[token] = rank
            lines[rank] = number
    if not ranks:
        problems.add(f"{MODEL_FILE} has no token")
        return ranks
    missing = sorted(set(range(max(lines) + 1)) - lines.keys())
    if missing:
        problems.add(f"{MODEL_FILE} lacks rank {_few(missing)}; ranks count from 0 without a gap")
    absent = [value for value in range(256) if bytes([value]) not in ranks]
    if absent:
        problems.add(f"{MODEL_FILE} lacks the token of byte {_few(absent)}; every single byte is a token")
    return ranks


def _token(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def _rank(text: bytes) -> int | None:
    if not re.fullmatch(rb"[0-9]{1,7}", text):
        return None
    rank = int(text)
    return rank if rank <= _LARGEST_RANK else None


def _names(content: bytes | None, base: int, problems: _Problems) -> dict[int, str]:
    named: dict[int, str] = {}
    if content is None:
        return named
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        problems.add(f"{CONFIG_FILE} is not JSON: {error}")
        return named
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        problems.add(f"{CONFIG_FILE} has no object added_tokens_decoder")
        return named
    owners: dict[str, int] = {}
    for key, number, name in _entries(added, problems):
        where = f"{CONFIG_FILE} id {key}"
        if not base <= number < base + RESERVED:
            problems.add(
                f"{where} ({name}) is not one of the {RESERVED} ids after the tokens: {base} to {base + RESERVED - 1}"
            )
        elif number in named:
            problems.add(f"{where} ({name}) names an id that has a name already: {named[number]}")
        elif name in owners:
            problems.add(f"{where} repeats the name {name} of id {owners[name]}")
        else:
            named[number] = name
            owners[name] = number
    for number in set(range(base, base + RESERVED)) - named.keys():
        if owner := owners.get(generated_name(number)):
            problems.add(f"{CONFIG_FILE} id {owner} has the name that belongs to the unnamed id {number}")
    for name in _REQUIRED:
        if name not in owners:
            problems.add(f"{CONFIG_FILE} does not name {name}, which frames every message")
    return named


def _entries(added: dict[str, Any], problems: _Problems) -> Iterator[tuple[str, int, str]]:
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch(r"[0-9]{1,7}", key):
            problems.add(f"{CONFIG_FILE}: {key[:40]!r} is not a token id")
        elif not isinstance(name, str) or not name or not name.isprintable() or len(name) > 256:
            problems.add(f"{CONFIG_FILE} id {key} has no usable content: {str(name)[:40]!r}")
        else:
            yield key, int(key), name


def _few(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"


def _excerpt(value: bytes) -> str:
    return repr(value if len(value) <= 40 else value[:40] + b"...")
