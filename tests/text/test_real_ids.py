"""Ids of the released vocabulary. The vocabulary is not part of the repository; what can be checked without it is."""

import hashlib
import json
import re

import pytest

from kimi_jax.text.tokenizer import pieces
from tests.text.data import FOLDER, golden_prompt, ids_digest

REAL = json.loads((FOLDER / "real_ids.json").read_text())
CHATS = {chat["id"]: chat for chat in REAL["chats"]}

# Ids that other projects have published; chat-format, sections 1 and 2.
CONTROL = {
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
}
WORDS = {
    "message": [2778],
    " role": [6244],
    '="': [878],
    "user": [2482],
    "system": [14062],
    "assistant": [69702],
    "tool": [20960],
    '"': [1],
    " type": [1798],
    " tool": [4453],
    " index": [4002],
    " key": [2355],
    "think": [39964],
    "response": [12092],
    "tools": [25385],
    "call": [10257],
    "argument": [47185],
    "string": [2033],
    "tool-declare": [20960, 120083, 677],
    "thinking-effort": [130400, 59991, 470],
}
ORDINARY = r"(?:(?!1635(?:8[4-9]|9\d)|163[6-8]\d\d)\d+ )+?"


def ids_pattern(found):
    """What the ids of segments look like, as far as it is known without the vocabulary."""
    parts = []
    for text, markers in found:
        known = [CONTROL[text]] if markers and text in CONTROL else WORDS.get(text)
        if markers and known is None:
            parts.append(r"(?:\d+ )+?")
        else:
            parts.append("".join(f"{number} " for number in known) if known else ORDINARY)
    return re.compile("".join(parts))


@pytest.mark.parametrize("name", sorted(CHATS))
def test_prompt(name):
    assert "".join(segment.text for segment in golden_prompt(CHATS[name])) == CHATS[name]["text"]


@pytest.mark.parametrize("name", sorted(CHATS))
def test_the_ids_follow_the_segments(name):
    ids = "".join(f"{number} " for number in CHATS[name]["ids"])
    assert ids_pattern(golden_prompt(CHATS[name])).fullmatch(ids)  # red when an attribute or a tag is left out


def test_long_texts_are_cut():
    lengths = {
        name: len(list(pieces(case["unit"] * case["count"] + case["suffix"])))
        for name, case in REAL["long_texts"].items()
    }
    assert lengths == {"no_whitespace": 2, "whitespace": 2, "words": 1, "over_400k": 2}


def test_the_vocabulary_is_the_released_one(real_tokenizer, request):
    folder = request.config.getoption("--real-tokenizer")
    with open(f"{folder}/tiktoken.model", "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == REAL["tiktoken_model_sha256"]
    assert real_tokenizer.vocab_size == 163_840
    assert {name: real_tokenizer.special_id(name) for name in CONTROL} == CONTROL


def test_texts(real_tokenizer):
    for name, case in REAL["texts"].items():
        assert real_tokenizer.encode(case["text"]) == case["ids_markers_off"], name
        assert real_tokenizer.encode(case["text"], markers=True) == case["ids_markers_on"], name


def test_long_texts(real_tokenizer):
    for name, case in REAL["long_texts"].items():
        ids = real_tokenizer.encode(case["unit"] * case["count"] + case["suffix"])
        assert (len(ids), ids_digest(ids)) == (case["num_ids"], case["ids_sha256"]), name


def test_words(real_tokenizer):
    assert {word: real_tokenizer.encode(word) for word in WORDS} == WORDS


@pytest.mark.parametrize("name", sorted(CHATS))
def test_chat_ids(real_tokenizer, name):
    assert real_tokenizer.encode_segments(golden_prompt(CHATS[name])) == CHATS[name]["ids"]
