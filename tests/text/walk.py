"""Replies drawn at random from a grammar: what a model with no idea of its task would write under its masks."""

import random

import numpy as np

from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.grammar import ReplyGrammar
from kimi_jax.text.markup import CLOSE, END, SEALED, SPELLED
from tests.text.data import TINY

LONGEST = 3000
_ENDS = [TINY.special_id(END), TINY.special_id(CLOSE), *(TINY.ranks[mark] for mark in (b"}", b"]", b'"'))]


def allowed(grammar: ReplyGrammar) -> np.ndarray:
    """The ids that may come next."""
    bits = grammar.mask()
    assert (bits.dtype, bits.shape) == (np.uint32, (-(-TINY.vocab_size // 32),))
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(grammar: ReplyGrammar, seed: int) -> list[int]:
    """The ids of a whole reply. The longer it is, the likelier it takes a way out."""
    chance = random.Random(seed)
    ids: list[int] = []
    while not grammar.finished:
        assert len(ids) < LONGEST, TINY.decode(ids)
        choices = allowed(grammar)
        assert choices.size, TINY.decode(ids)  # a step without a choice would draw anything
        assert choices[-1] < TINY.vocab_size
        ends = [end for end in _ENDS if end in choices]
        token = int(chance.choice(ends if ends and chance.random() < min(len(ids) / 150, 0.8) else choices))
        grammar.accept(token)
        ids.append(token)
    return ids


def feed(grammar: ReplyGrammar, ids: list[int]) -> int:
    """How many of the ids the grammar takes."""
    for place, token in enumerate(ids):
        if token not in allowed(grammar):
            return place
        grammar.accept(token)
    return len(ids)


def read(ids: list[int], *, sealed: bool = True) -> str:
    """The text of a reply for its parser."""
    decoder = Detokenizer(TINY, markup=SEALED if sealed else SPELLED)
    return "".join(map(decoder.push, ids)) + decoder.flush()
