import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.markup import IMAGE_SLOT
from kimi_jax.text.tokenizer import RUN, SLICE, EncodeError, Tokenizer, pieces
from kimi_jax.text.vocabulary import Vocabulary, read_vocabulary
from kimi_jax.text.write_vocabulary import NAMED
from tests.text.data import FOLDER, TINY, UNICODE, ids_digest


def test_golden_texts(golden, tokenizer):
    for name, case in golden("tokenizer_tiny.json")["texts"].items():
        # Red when an alternative of the pattern is changed (`\p{N}{1,3}` to `\p{N}+`) or markers are always on.
        assert tokenizer.encode(case["text"]) == case["ids_markers_off"], name
        assert tokenizer.encode(case["text"], markers=True) == case["ids_markers_on"], name
        assert tokenizer.decode(tokenizer.encode(case["text"])) == case["text"], name


def test_golden_long_texts(golden, tokenizer):
    for name, case in golden("tokenizer_tiny.json")["long_texts"].items():
        ids = tokenizer.encode(case["unit"] * case["count"] + case["suffix"])
        # Red when RUN or SLICE is changed by one, or the cuts are left out.
        assert (len(ids), ids_digest(ids)) == (case["num_ids"], case["ids_sha256"]), name


def test_golden_decoding(golden, tokenizer):
    for case in golden("tokenizer_tiny.json")["decode_prefixes"]:
        assert b"".join(map(tokenizer.token_bytes, case["ids"])).hex() == case["bytes_hex"]
        assert tokenizer.decode(case["ids"]) == case["text"]  # red with errors="ignore"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("1234", "123"),
        ("1a", "1"),
        ("你好world", "你好"),
        ("world你好", "world"),
        ("WORLD你好", "WORLD"),
        ("!你a", "!"),
        ("!你A", "!"),
        ("HelloWorld", "Hello"),
        ("JSONSchema", "JSONSchema"),
        ("iPhone", "i"),
        ("don't go", "don't"),
        ("WE'LL go", "WE'LL"),
        (" word word", " word"),
        ("  word", " "),
        (".word", ".word"),
        ("a_b", "a"),
        (" !?\n\nx", " !?\n\n"),
        (" \n\n x", " \n\n"),
        ("\t\t", "\t\t"),
        ("क्षत्रिय", "क्षत्रिय"),
        ("ʰª", "ʰª"),
        ("3.14", "3"),
    ],
)
def test_where_the_pattern_cuts(text, first):
    """With a token for every beginning of the text, its first token is as long as the pattern lets it be."""
    content = text.encode()
    tokens = [bytes([value]) for value in range(256)] + [content[:size] for size in range(2, len(content) + 1)]
    names = {len(tokens) + offset: name for name, offset in NAMED.items()}
    tokenizer = Tokenizer(Vocabulary({token: rank for rank, token in enumerate(tokens)}, names))
    assert tokenizer.token_bytes(tokenizer.encode(text)[0]).decode() == first


def test_named_ids_are_where_the_release_has_them(golden, tokenizer):
    case = golden("tokenizer_tiny.json")
    for name, offset in case["named_offsets"].items():
        assert tokenizer.special_id(name) == case["special_base"] + offset
    assert tokenizer.vocab_size == case["special_base"] + 256
    assert len(tokenizer.special_ids) == 256
    assert tokenizer.special_id("<|reserved_token_594|>") == 594
    with pytest.raises(KeyError, match="kimi_image_placeholder"):
        tokenizer.special_id(IMAGE_SLOT)


def test_ids_that_stop_and_ids_that_are_banned(tokenizer):
    assert tokenizer.stop_ids == (566, 565, 573)  # red when [EOS] comes first: a message ends with <|end_of_msg|>
    assert tokenizer.special_id("[PAD]") in tokenizer.banned_ids
    assert tokenizer.special_id("<|open|>") not in tokenizer.banned_ids
    assert len(tokenizer.banned_ids) == 256 - 16 + 1


def test_a_run_is_cut_where_python_calls_it_white_space():
    text = "a" * (RUN + 1) + "\x1c" * (RUN + 2) + "b"  # \x1c: white space for Python, not for the pattern
    assert list(map(len, pieces(text))) == [RUN, 1 + RUN, 2 + 1]
    assert list(pieces("x " * (SLICE // 2 + 1))) == ["x " * (SLICE // 2), "x "]
    assert list(pieces("")) == []


@given(st.lists(st.tuples(st.sampled_from(["ab", " ", "\n", "你"]), st.integers(1, 3 * RUN)), max_size=4))
def test_pieces_add_up_and_hold_no_long_run(runs):
    text = "".join(unit * count for unit, count in runs)
    found = list(pieces(text))
    assert "".join(found) == text  # red when the last part of a cut run is lost
    for piece in found:
        assert len(piece) <= SLICE
        assert all(len(word) <= RUN for word in piece.split())


@given(st.lists(st.one_of(UNICODE, st.sampled_from(sorted(TINY.special_ids)), st.just(IMAGE_SLOT))).map("".join))
def test_text_never_becomes_a_reserved_id(text):
    ids = TINY.encode(text)  # red with markers on
    assert all(number < 564 for number in ids)
    assert TINY.decode(ids) == text


@pytest.mark.parametrize("name", sorted(TINY.special_ids))
def test_every_reserved_name_is_text_unless_marked(name):
    assert all(number < 564 for number in TINY.encode(f"x{name}y"))
    assert TINY.encode(name, markers=True) == [TINY.special_ids[name]]
    assert TINY.decode([TINY.special_ids[name]]) == name


@given(UNICODE)
def test_decoding_gives_the_text_back(text):
    assert TINY.decode(TINY.encode(text)) == text
    assert TINY.decode(TINY.encode(text, markers=True)) == text


@given(st.lists(st.tuples(st.text("ab_\"='", max_size=5), st.booleans())))
def test_segments_are_encoded_one_by_one(segments):
    expected = [number for text, markers in segments for number in TINY.encode(text, markers)]
    assert TINY.encode_segments(segments) == expected


def test_joined_segments_would_give_other_ids():
    assert TINY.encode_segments([('="', False), ("_id", False)]) != TINY.encode('="_id')


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "\ud83d\ude00"])
def test_half_a_surrogate_pair_is_refused(text):
    with pytest.raises(EncodeError, match="half a surrogate"):  # red when left to the library, which replaces it
        TINY.encode(text)


@pytest.mark.parametrize("number", [-1, 820, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(number):
    with pytest.raises(ValueError, match="0 to 819"):  # -1: red when left to list indexing
        TINY.token_bytes(number)


@pytest.mark.parametrize(
    "unit", [" ", "\n", " \n", "\t", "A", "a", "Aa", "!", "你", "\u0300", "ʰ", "'", "1", "\x1c", "\x00"]
)
def test_hostile_repetition_is_encoded(unit):
    text = (unit * 60_000)[:60_000]  # red when runs are not cut: the pattern overflows its stack on long white space
    assert TINY.decode(TINY.encode(text)) == text


def test_skipped_ids_leave_no_text(tokenizer):
    end = tokenizer.special_id("<|end_of_msg|>")
    assert tokenizer.decode([64, end], skip={end}) == "a"


def test_the_vocabulary_is_what_the_files_say():
    vocabulary = read_vocabulary(FOLDER / "tiny-tokenizer")
    assert vocabulary.ranks[b" "] == 220
    assert vocabulary.ranks[b"\x00"] == 188
    assert len(vocabulary.named) == 16


def test_a_text_of_which_the_rest_is_not_wanted():
    # red when all of it is encoded, which takes a minute for what a request may hold, or when ids are cut off
    text = "ab " * 1_000_000
    some = TINY.encode(text, most=1000)
    assert 1000 < len(some) < 1_000_000
    assert some == TINY.encode(text[:SLICE])
    assert TINY.encode("ab ab", most=1000) == TINY.encode("ab ab")
    segments = [("ab ab", False)] * 5
    assert TINY.encode_segments(segments, most=1) == TINY.encode("ab ab")
    assert TINY.encode_segments(segments, most=1000) == TINY.encode_segments(segments)
