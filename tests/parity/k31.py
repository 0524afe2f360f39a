"""k31-tiny as the tests load it: a Kimi K3.1 Pro text model whose indexers keep 8 tokens."""

from functools import cache
from typing import Any

import numpy as np

import kimi_jax
from kimi_jax.api import Kimi
from tests.conftest import FIXTURES
from tests.parity.models import CAPACITY

TINY = FIXTURES / "k31-tiny"
LATENT = (3, 7, 8)
"""Layers with an indexer."""

PROMPTS = range(7)
"""Of 1, 5, 8, 9, 12, 26 and 96 tokens: below, at, just above and far above what is kept."""


@cache
def tiny(layout: str = "single", dtype: str = "float32", **options: Any) -> Kimi:
    """The model; equal arguments give the same one and so the same compiled steps."""
    return kimi_jax.load(TINY, layout=layout, dtype=dtype, **{"max_seq_len": CAPACITY, "prefill_chunk": 16, **options})


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(TINY / "golden.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if not name.startswith(("topk/", "indexer/", "dcp/"))}


def prompt(index: int) -> list[int]:
    return golden()[f"prompt{index}/ids"].tolist()


def logits(index: int) -> np.ndarray:
    return golden()[f"prompt{index}/logits"]
