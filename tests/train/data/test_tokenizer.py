"""The tokenizer that is learned from the data."""

import hashlib
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.write_vocabulary import BYTES, NAMED
from kimi_jax.train.data.bpe import counted_pieces, merges
from kimi_jax.train.data.tokenizer import SIZE, write_tokenizer
from kimi_jax.train.data.words import ADJECTIVES, CITIES, PEOPLE, THINGS, WORDS


def test_the_files_are_the_same_everywhere(nano_folder):
    digest = hashlib.sha256((nano_folder / "tiktoken.model").read_bytes()).hexdigest()
    # Changes with the generators: weights trained for these ids would no longer fit.
    assert digest == "dc7a5bd2e74ffe9553e03854e28209e7e47e0da3370f73a5f65f998758f06bc0"


def test_it_has_the_release_s_form(nano_tokenizer):
    base = SIZE - 256
    assert nano_tokenizer.vocab_size == SIZE
    assert {name: nano_tokenizer.special_id(name) - base for name in NAMED} == NAMED
    assert [nano_tokenizer.token_bytes(at) for at in range(256)] == [bytes([value]) for value in BYTES]
    assert nano_tokenizer.stop_ids[0] == base + 2


def test_digits_stand_alone(nano_tokenizer):
    for number in (7, 42, 1996, 123456):
        text = str(number)
        assert len(nano_tokenizer.encode(text)) == len(text)  # red when numbers are counted among the pieces
    assert not [token for token in nano_tokenizer.ranks if len(token) > 1 and any(48 <= value < 58 for value in token)]


def test_words_of_the_data_are_one_token_each(nano_tokenizer):
    words = {*WORDS, *ADJECTIVES, *CITIES, *PEOPLE, *THINGS}
    # Red without the word lists in the corpus: a word that is rare there would be several tokens.
    assert [word for word in sorted(words) if len(nano_tokenizer.encode(f" {word}")) > 1] == []
    assert [word for word in WORDS if len(nano_tokenizer.encode(word)) > 1] == []


@given(st.text())
def test_any_text_comes_back(nano_tokenizer, text):
    ids = nano_tokenizer.encode(text)
    assert nano_tokenizer.decode(ids) == text  # red when a byte has no token
    assert all(number < SIZE - 256 for number in ids)


@given(st.binary())
def test_any_bytes_come_back(nano_tokenizer, data):
    text = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()
    assert nano_tokenizer.decode(nano_tokenizer.encode(text)) == text
    ids = [nano_tokenizer.ranks[bytes([value])] for value in data]
    assert b"".join(map(nano_tokenizer.token_bytes, ids)) == data


def naive(pieces):
    """The same merges by counting everything again after each."""
    words = {piece: [bytes([value]) for value in piece] for piece in pieces}
    while True:
        counts = {}
        for piece, parts in words.items():
            for pair in pairwise(parts):
                counts[pair] = counts.get(pair, 0) + pieces[piece]
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            return
        yield best[0] + best[1]
        for parts in words.values():
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = [best[0] + best[1]]
                at += 1


@pytest.mark.parametrize("seed", range(5))
def test_merges_are_those_of_the_plain_rule(seed):
    chance = random.Random(seed)
    words = ["".join(chance.choices("abc", k=chance.randint(1, 9))) for _ in range(40)]
    pieces = counted_pieces([" ".join(words)])
    # Red when a pair's old count is taken for its new one, or aaa is merged from the right.
    assert list(merges(pieces)) == list(dict.fromkeys(naive(pieces)))


def test_a_size_that_does_not_work(tmp_path):
    with pytest.raises(ValueError, match="multiples of 8 from 512"):
        write_tokenizer(tmp_path, 1001)
