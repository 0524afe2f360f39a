"""The golden chat data, its small tokenizer, and where the real vocabulary is, if it is anywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_jax.text.tokenizer import Tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-tokenizer", help="folder with the released tiktoken.model and tokenizer_config.json")


@pytest.fixture(scope="session")
def chat(fixtures: Path) -> Path:
    return fixtures / "chat"


@pytest.fixture(scope="session")
def golden(chat: Path) -> Callable[[str], Any]:
    return lambda name: json.loads((chat / name).read_text())


@pytest.fixture(scope="session")
def tokenizer(chat: Path) -> Tokenizer:
    return Tokenizer.from_folder(chat / "tiny-tokenizer")


@pytest.fixture(scope="session")
def real_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    folder = request.config.getoption("--real-tokenizer", default=None)
    if folder is None:
        pytest.skip("the released vocabulary is not part of the repository: pytest tests/text --real-tokenizer FOLDER")
    return Tokenizer.from_folder(folder)
