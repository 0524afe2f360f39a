"""Tokenizer files that are missing or damaged: what is said about them."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.testing.tokenizer import write_tiny_tokenizer
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.text.vocabulary import CONFIG_FILE, MODEL_FILE, TokenizerError, TokenizerMissing, read_vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_tokenizer(tmp_path, 520)


def problems(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        read_vocabulary(folder)
    return str(caught.value)


def line(token: bytes, rank: object) -> str:
    return f"{base64.b64encode(token).decode()} {rank}\n"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def rename(folder: Path, changes: dict[str, object], key: str = "content") -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    for number, name in changes.items():
        config["added_tokens_decoder"][number] = {key: name}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerMissing, match="token ids work"):
        Tokenizer.from_folder(tmp_path)


def test_one_file_of_the_two(folder):
    (folder / CONFIG_FILE).unlink()
    assert f"{CONFIG_FILE} is missing" in problems(folder)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("!!!! 264\n", "is not the base64"),
        (line(b"", 264), "has 1 fields"),
        ("= 264\n", "is not the base64"),
        ("!enp6 264\n", "is not the base64"),
        (line(b"zq", "x"), "is not a rank"),
        (line(b"zq", -1), "is not a rank"),
        (line(b"zq", "9" * 5000), "is not a rank"),
        (line(b"zq", 9_999_999), "is not a rank"),
        (line(b"zq", "264 7"), "3 fields"),
        (line(b"zq", 3), "repeats rank 3"),
        (line(b"a", 264), "repeats the token"),
        (line(b"zq", 270), "lacks rank 264"),
    ],
)
def test_a_bad_line_is_named(folder, extra, said):
    with (folder / MODEL_FILE).open("a") as file:
        file.write(extra)
    assert said in problems(folder)  # each red when its check is left out


def test_a_missing_byte_is_named(folder):
    path = folder / MODEL_FILE
    edit(path, line(b"a", 64), line(b"zqzq", 64))
    assert "lacks the token of byte 97" in problems(folder)  # else encoding "a" would take the process down


def test_all_problems_at_once(folder):
    with (folder / MODEL_FILE).open("a") as file:
        file.write("!!!! 264\n" + line(b"zq", "x"))
    rename(folder, {"9999": "far"})
    said = problems(folder)
    assert "3 problems" in said
    assert all(part in said for part in ("line 265", "line 266", "id 9999"))


def test_a_file_of_nonsense_is_summed_up(folder):
    (folder / MODEL_FILE).write_bytes(b"\xff\xfe nonsense\n" * 10_000)
    said = problems(folder)
    assert len(said) < 4000
    assert "more like these" in said


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file(folder, content):
    (folder / MODEL_FILE).write_bytes(content)
    assert "has no token" in problems(folder)


def test_a_file_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr("kimi_jax.text.vocabulary._MODEL_LIMIT", 100)
    assert "larger than 100 bytes" in problems(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"added_tokens_decoder": []}', b"\xff", b"[" * 100_000, b'{"added_tokens_decoder": null}'],
)
def test_a_config_that_is_none(folder, content):
    (folder / CONFIG_FILE).write_bytes(content)
    assert CONFIG_FILE in problems(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"3": "x"}, "not one of the 256 ids after the tokens: 264 to 519"),
        ({"520": "x"}, "not one of the 256"),
        ({"-1": "x"}, "not a token id"),
        ({"x": "x"}, "not a token id"),
        ({"0272": "x", "272": "y"}, "names an id that has a name already"),
        ({"272": "[BOS]"}, "repeats the name [BOS]"),
        ({"272": "<|reserved_token_300|>"}, "belongs to the unnamed id 300"),
        ({"272": ""}, "no usable content"),
        ({"272": 5}, "no usable content"),
        ({"267": "<|opened|>"}, "does not name <|open|>"),
    ],
)
def test_a_bad_name_is_named(folder, changes, said):
    rename(folder, changes)
    assert said in problems(folder)


def test_a_name_without_content(folder):
    rename(folder, {"272": "x"}, key="contents")
    assert "no usable content" in problems(folder)


@given(st.binary(max_size=200), st.integers(0, 3000))
def test_a_damaged_file_is_refused_or_read_but_never_a_crash(tmp_path_factory, noise, at):
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("noise"), 520)
    for name in (MODEL_FILE, CONFIG_FILE):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:at] + noise + content[at + len(noise) :])
    try:
        Tokenizer.from_folder(folder).encode("some text")
    except TokenizerError as error:
        assert error.problems
