"""Byte pair encoding, learned from a text: merges in the order in which they are made.

Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016; on bytes instead of letters.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import regex

from kimi_jax.text.tokenizer import PATTERN

_PIECES = regex.compile(f"(?V1){PATTERN}")  # V1: intersections of character classes
_NUMERIC = regex.compile(r"\p{N}")

Pair = tuple[bytes, bytes]


def counted_pieces(texts: Iterable[str]) -> Counter[bytes]:
    """What merges never cross, with how often it comes. Numbers are left out, so that every digit stays a token."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(piece.encode() for piece in _PIECES.findall(text) if not _NUMERIC.search(piece))
    return counts


def merges(pieces: Mapping[bytes, int], least: int = 2) -> Iterator[bytes]:
    """The tokens that merging makes: the commonest pair first, of equals the one that sorts first.

    Only the pieces that hold the merged pair are counted again, so a step costs what it changes.

    Args:
      pieces: text -> how often it comes.
      least: a pair seen less often is not merged.
    """
    words = [([bytes([value]) for value in piece], count) for piece, count in sorted(pieces.items())]
    counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for at, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            counts[pair] += count
            places[pair].add(at)
    queue = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(queue)
    made: set[bytes] = set()
    while queue:
        claimed, pair = heapq.heappop(queue)
        if counts[pair] != -claimed:  # it has changed since; the newer entry follows
            continue
        if counts[pair] < least:
            return
        token = pair[0] + pair[1]
        if token not in made:  # the same bytes may be reached by two ways
            made.add(token)
            yield token
        changed: set[Pair] = set()
        for at in places.pop(pair):
            parts, count = words[at]
            for old in pairwise(parts):
                counts[old] -= count
                changed.add(old)
            parts[:] = _merged(parts, pair)
            for new in pairwise(parts):
                counts[new] += count
                places[new].add(at)
                changed.add(new)
        for one in changed:
            if counts[one] > 0:
                heapq.heappush(queue, (-counts[one], one))
        del counts[pair]


def _merged(parts: list[bytes], pair: Pair) -> list[bytes]:
    merged: list[bytes] = []
    at = 0
    while at < len(parts):
        if at + 1 < len(parts) and (parts[at], parts[at + 1]) == pair:
            merged.append(parts[at] + parts[at + 1])
            at += 2
        else:
            merged.append(parts[at])
            at += 1
    return merged
