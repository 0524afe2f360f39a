"""A tiny model with a tokenizer that a server can load in a second: the quick one, with text and room for conversations."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from kimi_jax.serve.model import Served
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json
from kimi_jax.testing.tokenizer import write_tiny_tokenizer
from kimi_jax.text.grammar import Grammars
from kimi_jax.text.tokenizer import Tokenizer
from tests.parity.quick import SIZES

NAMES = ("quick", "kimi")
CAPACITY = 1024


@cache
def folder() -> Path:
    """Its checkpoint with a tokenizer: a default request is about 150 tokens long."""
    home = Path(tempfile.mkdtemp(prefix="quick-chat-"))
    atexit.register(shutil.rmtree, home)
    return write_random_checkpoint(home, config_json(**{**SIZES, "max_position_embeddings": CAPACITY}), seed=3)


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer alone, made without weights."""
    home = Path(tempfile.mkdtemp(prefix="quick-words-"))
    atexit.register(shutil.rmtree, home)
    write_tiny_tokenizer(home, size=SIZES["vocab_size"])
    return Tokenizer.from_folder(home)


@cache
def served() -> Served:
    """What a server knows of it."""
    words = tokenizer()
    return Served(NAMES, words, Grammars(words), words.stop_ids, CAPACITY, 1000, created=1_700_000_000)


def reply(text: str) -> list[int]:
    """The ids of a reply in the spelled markup."""
    return tokenizer().encode(text, markers=True)
