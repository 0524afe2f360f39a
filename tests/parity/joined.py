"""Text model and vision tower in one small checkpoint that every shipped layout cuts and that compiles fast."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json, with_vision
from tests.parity.quick import SIZES

CAPACITY = 128
VOCAB = SIZES["vocab_size"]


@cache
def folder() -> Path:
    """Its checkpoint: the same bytes every time, with tokenizer files."""
    home = Path(tempfile.mkdtemp(prefix="joined-model-"))
    atexit.register(shutil.rmtree, home)
    config = with_vision(config_json(**{**SIZES, "kda_heads": 8, "num_attention_heads": 8}), vt_num_hidden_layers=1)
    return write_random_checkpoint(home, config, seed=5)


@cache
def joined(**options: Any) -> Kimi:
    """The model in float32; equal options share their compiled steps."""
    return kimi_jax.load(folder(), dtype="float32", **{"max_seq_len": CAPACITY, "prefill_chunk": 16, **options})
