import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED
from tests.text.data import TINY, UNICODE

IDS = st.lists(st.one_of(st.integers(0, 255), st.integers(0, TINY.vocab_size - 1)))


def single(value: bytes) -> list[int]:
    by_bytes = {TINY.token_bytes(number): number for number in range(256)}
    return [by_bytes[bytes([byte])] for byte in value]


def text_ids() -> st.SearchStrategy[list[int]]:
    """Text as single bytes, so that every character is split over ids; sometimes with a byte missing."""
    texts = UNICODE.map(lambda text: single(text.encode()))
    return st.tuples(texts, st.integers(0, 40)).map(lambda pair: pair[0][: pair[1]] + pair[0][pair[1] + 1 :])


@given(st.one_of(IDS, text_ids()))
def test_pieces_add_up_to_the_whole(ids):
    decoder = Detokenizer(TINY)
    found = [decoder.push(number) for number in ids]
    assert "".join(found) + decoder.flush() == TINY.decode(
        ids
    )  # red when flush is left out, or pieces are decoded alone


@given(UNICODE)
def test_no_replacement_for_a_character_that_is_still_coming(text):
    decoder = Detokenizer(TINY)
    sent = ""
    for number in single(text.encode()):
        sent += decoder.push(number)
        assert text.startswith(sent)  # red when each token's bytes are decoded by themselves
    assert sent == text
    assert decoder.flush() == ""


@given(IDS, st.sets(st.integers(0, TINY.vocab_size - 1)))
def test_skipped_ids_leave_no_text(ids, skip):
    decoder = Detokenizer(TINY, skip=skip)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == TINY.decode(ids, skip=skip)


def test_a_character_that_never_completes():
    decoder = Detokenizer(TINY)
    assert [decoder.push(number) for number in single("👋".encode()[:3])] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(64) == "a"


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="not in the vocabulary"):
        Detokenizer(TINY).push(TINY.vocab_size)


def test_sealed_control_tokens_differ_from_their_spelling():
    decoder = Detokenizer(TINY, markup=SEALED)
    spelled, real = TINY.encode("<|open|>x"), TINY.encode("<|open|>x", markers=True)
    assert "".join(map(decoder.push, spelled)) == "<|open|>x"
    assert "".join(map(decoder.push, real)) == SEALED.open + "x"


def test_a_sealed_token_ends_a_character_that_is_not_complete():
    decoder = Detokenizer(TINY, markup=SEALED)
    ids = [*single("👋".encode()[:2]), TINY.special_id("<|open|>"), 64]
    assert "".join(map(decoder.push, ids)) == f"\ufffd{SEALED.open}a"


@given(st.text(st.sampled_from([SEALED.open, SEALED.close, SEALED.sep, SEALED.end, "a"])))
def test_no_text_can_forge_a_sealed_token(text):
    decoder = Detokenizer(TINY, markup=SEALED)
    found = "".join(map(decoder.push, TINY.encode(text)))
    assert set(found) <= {"a", "\ufffd"}  # red when `sealed` is the identity
    assert len(found) == len(text)
