"""k3-tiny as the tests load it, once per process for every way of loading, and its compiled steps driven by hand."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.cache import Cache, KdaCache, MlaCache

TINY = Path(__file__).parents[1] / "fixtures" / "k3-tiny"
CAPACITY = 128
TOLERANCE = 1e-4
GARBAGE = 1_000_000_007
"""A padding id far outside every vocabulary."""


@cache
def tiny(layout: str = "single", dtype: str = "float32", **options: Any) -> Kimi:
    """k3-tiny; equal arguments give the same model and so the same compiled steps."""
    return kimi_jax.load(TINY, layout=layout, dtype=dtype, **{"max_seq_len": CAPACITY, "prefill_chunk": 16, **options})


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(TINY / "golden.npz") as arrays:
        return dict(arrays)


def prompt(index: int) -> list[int]:
    return golden()[f"prompt{index}/ids"].tolist()


def logits(index: int) -> np.ndarray:
    return golden()[f"prompt{index}/logits"]


def assert_logits(got: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


class Slots:
    """Rows of one cache, each at its own place in its own sequence, advanced by ``Steps.score``."""

    def __init__(self, kimi: Kimi, rows: int) -> None:
        self.steps, self.params = kimi.runner.steps, kimi.runner.params
        self.cache: Cache = self.steps.new_cache(rows)
        self.position = np.zeros(rows, np.int32)

    def feed(self, parts: Sequence[Sequence[int]], width: int, padding: int = GARBAGE) -> list[np.ndarray]:
        """Runs the next tokens of each row in one call of ``width``; an empty part idles. Logits of the real tokens."""
        ids = np.full((len(self.position), width), padding, np.int32)
        for row, part in enumerate(parts):
            ids[row, : len(part)] = part
        new = np.array([len(part) for part in parts], np.int32)
        scores, self.cache = self.steps.score(self.params, self.cache, ids, self.position, new)
        self.position = self.position + new
        scores = np.asarray(scores)
        return [scores[row, : len(part)] for row, part in enumerate(parts)]

    def run(self, parts: Sequence[Sequence[int]], width: int, padding: int = GARBAGE) -> list[np.ndarray]:
        """Like :meth:`feed` for parts of any length, in as many calls as the longest needs."""
        calls = range(0, max(map(len, parts)), width)
        pieces = [self.feed([part[start : start + width] for part in parts], width, padding) for start in calls]
        return [np.concatenate(row) for row in zip(*pieces, strict=True)]

    def restart(self, *rows: int) -> None:
        """Starts new sequences in some rows, the way the engine does."""
        fresh = np.isin(np.arange(len(self.position)), rows)
        self.cache = self.steps.reset(self.cache, fresh)
        self.position = np.where(fresh, 0, self.position)

    def poison(self, value: float, *rows: int) -> None:
        """Fills what no later call may read: latent rows and index keys past each length, and everything of the given rows."""

        def overwrite(entry: Any) -> Any:
            if isinstance(entry, MlaCache):
                held = []
                for array in jax.tree.leaves(entry):
                    values = np.array(array)
                    for row, length in enumerate(self.position):
                        values[row, 0 if row in rows else length :] = value
                    held.append(_like(values, array))
                return jax.tree.unflatten(jax.tree.structure(entry), held)
            conv, state = np.array(entry.conv), np.array(entry.state)
            conv[list(rows)] = state[list(rows)] = value
            return KdaCache(_like(conv, entry.conv), _like(state, entry.state))

        self.cache = tuple(map(overwrite, self.cache))

    def of_row(self, row: int) -> list[np.ndarray]:
        """Everything the cache holds for the tokens of one row so far."""
        length = self.position[row]
        return [
            np.asarray(array)[row, :length] if isinstance(entry, MlaCache) else np.asarray(array)[row]
            for entry in self.cache
            for array in jax.tree.leaves(entry)
        ]


def _like(values: np.ndarray, array: jax.Array) -> jax.Array:
    return jax.device_put(values.astype(array.dtype), array.sharding)
