import hashlib
import json

import pytest

from kimi_jax.testing.tokenizer import base_tokens, write_tiny_tokenizer
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.text.write_vocabulary import NAMED
from tests.text.data import FOLDER

SAMPLE = 'The assistant may call tools: {"type":"object"} It\'s 你好世界。 naïve 👋\n\n  def f(x):'


@pytest.mark.parametrize("size", [512, 520, 1024, 4096])
def test_the_vocabulary_has_the_size_asked_for(tmp_path, size):
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path / "new" / "folder", size))
    assert tokenizer.vocab_size == size
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert {name: tokenizer.special_id(name) - (size - 256) for name in NAMED} == NAMED


def test_names_and_flags_are_those_of_the_release(tmp_path):
    ours = json.loads((write_tiny_tokenizer(tmp_path) / "tokenizer_config.json").read_text())
    golden = json.loads((FOLDER / "tiny-tokenizer" / "tokenizer_config.json").read_text())
    moved = {str(int(number) - 564 + 768): entry for number, entry in golden.pop("added_tokens_decoder").items()}
    assert ours.pop("added_tokens_decoder") == moved
    assert ours == golden


def test_single_bytes_are_in_the_released_order():
    golden = Tokenizer.from_folder(FOLDER / "tiny-tokenizer")
    assert base_tokens(256) == tuple(golden.token_bytes(number) for number in range(256))


def test_merges_are_learned(tmp_path):
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path))
    assert len(tokenizer.encode(SAMPLE)) < 0.7 * len(SAMPLE.encode())


def test_the_files_are_the_same_everywhere(tmp_path):
    content = (write_tiny_tokenizer(tmp_path) / "tiktoken.model").read_bytes()
    # Changes with the training text: weights saved for these ids would no longer fit.
    assert hashlib.sha256(content).hexdigest() == "a00c94ac51936247d306ffd8be90ea569e98f3a61546e67d26e8be1f0adc399c"


@pytest.mark.parametrize("size", [0, 504, 1023, 1 << 21])
def test_a_size_that_does_not_work(tmp_path, size):
    with pytest.raises(ValueError, match="multiples of 8"):
        write_tiny_tokenizer(tmp_path, size)
