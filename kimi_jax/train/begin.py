"""Where a language model begins: float32 masters drawn from one seed, each from its own stream by name."""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from kimi_jax.placement.axes import ArraySpec

DECAY_RANGE = (1e-3, 0.5)
"""Log decay per token of a KDA channel at the start, drawn evenly on a logarithmic scale: memories of 2 to 1,000 tokens."""


def initial(specs: Mapping[str, ArraySpec], bound: float | None, seed: int) -> dict[str, np.ndarray]:
    """Masters of a new model.

    Matrices keep the size of what they read (standard deviation ``in ** -0.5``); the projections of Attention Residuals are zero,
    so that the first mixes are plain means (training notes); norms are one, router biases zero.

    Args:
      specs: parameters by dotted name.
      bound: lower bound of the KDA gate.
      seed: of everything.
    """
    return {name: _values(name, spec.shape, bound, seed) for name, spec in specs.items()}


def _values(name: str, shape: tuple[int, ...], bound: float | None, seed: int) -> np.ndarray:
    random = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    kind, last = name.split(".")[-2:], name.split(".")[-1]
    if kind[0].endswith("_res_proj") or last in ("A_log", "bias", "e_score_correction_bias"):
        return np.zeros(shape, np.float32)
    if kind[0].endswith(("norm", "layernorm")):
        return np.ones(shape, np.float32)
    if last == "dt_bias":
        low, high = map(math.log, DECAY_RANGE)
        share = np.exp(random.uniform(low, high, shape)) / -(bound or -5.0)
        return np.log(share / (1 - share)).astype(np.float32)
    if kind[0].endswith("conv1d"):
        return random.uniform(-1, 1, shape).astype(np.float32) * shape[-1] ** -0.5
    scale = {"embed_tokens": 1.0, "lm_head": 0.1 * shape[-1] ** -0.5}.get(kind[0], shape[-1] ** -0.5)
    return random.standard_normal(shape, np.float32) * np.float32(scale)
