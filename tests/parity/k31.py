"""k31-tiny as the tests load it: a Kimi K3.1 Pro text model whose indexers keep 8 tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.layers import mla as mla_layer
from kimi_jax.model import Params
from kimi_jax.ops.context import api as context
from tests.conftest import FIXTURES
from tests.parity import trace
from tests.parity.models import CAPACITY

TINY = FIXTURES / "k31-tiny"
LATENT = (3, 7, 8)
"""Layers with an indexer. Prompts have 1, 5, 8, 9, 12, 26 and 96 tokens: below, at, just above and far above what is kept."""

SELECT = jax.jit(context.indexer.select, static_argnames=("k", "impl", "budget"))


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


@cache
def parameters() -> Params:
    """In float32 on one device, experts as stored."""
    return {name: jnp.asarray(np.asarray(array)) for name, array in tiny(experts="packed").runner.params.items()}


@contextmanager
def step_by_step() -> Iterator[pytest.MonkeyPatch]:
    """``trace.compiled_ops`` for this model too: every layer chooses between dense and sparse as it runs."""
    with trace.compiled_ops() as patch:
        patch.setattr(mla_layer, "cond", lambda few, dense, sparse: dense() if few else sparse())
        patch.setattr(context.indexer, "select", SELECT)
        yield patch
