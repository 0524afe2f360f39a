import pytest

from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train.data.tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory):
    """The learned tokenizer's files; learning takes a few seconds."""
    return write_tokenizer(tmp_path_factory.mktemp("nano-tokenizer"))


@pytest.fixture(scope="session")
def nano_tokenizer(nano_folder):
    return Tokenizer.from_folder(nano_folder)
