"""Rotary positions of a draft, plain or YaRN, in the two forms of the served drafts (DSpark notes, section 6).

The target has no positions. The standard form (GQA) scales the rotated vectors; the DeepSeek form (MLA) scales the softmax as well.
Rotation is by halves (GQA) or by neighbouring pairs (MLA).
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class YarnConfig:
    """Interpolation of slow channels.

    Attributes:
      original: positions the frequencies were trained for, never the model's own limit.
      truncate: whether the two ends of the ramp are whole channels; the DeepSeek form always truncates.
      mscale, mscale_all_dim, attention_factor: as given, None where they are not.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions; ``yarn`` None is the plain form."""

    theta: float
    yarn: YarnConfig | None = None


@dataclass(frozen=True)
class Rotation:
    """What rotates the vectors of one backbone.

    Attributes:
      frequencies: radians per position, one per pair of channels, float64.
      factor: multiplies the rotated channels.
      softmax: multiplies the softmax scale.
      pairs: whether a pair is two neighbours; otherwise channel ``i`` goes with ``i + half``.
    """

    frequencies: np.ndarray
    factor: float
    softmax: float
    pairs: bool

    def __call__(
        self, x: Float[Array, "rows tokens heads dim"], positions: Int[Array, "rows tokens"]
    ) -> Float[Array, "rows tokens heads dim"]:
        """Rotates every head by its token's position; angles in float32, the result in ``x.dtype``."""
        angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)
        cos, sin = jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor
        wide = x.astype(jnp.float32)
        if self.pairs:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        out = jnp.stack(turned, axis=-1).reshape(x.shape) if self.pairs else jnp.concatenate(turned, axis=-1)
        return out.astype(x.dtype)


def rotation(config: RopeConfig, dim: int, *, mla: bool) -> Rotation:
    """The rotation of ``dim`` channels in the form of one backbone."""
    plain = config.theta ** (-2 * np.arange(dim // 2) / dim)
    yarn = config.yarn
    if yarn is None:
        return Rotation(plain, 1.0, 1.0, pairs=mla)
    ramp = _ramp(yarn, config.theta, dim, truncate=yarn.truncate or mla)
    frequencies = plain * ((1 - ramp) + ramp / yarn.factor)
    factor, softmax = _mla_factors(yarn) if mla else (_gqa_factor(yarn), 1.0)
    return Rotation(frequencies, factor, softmax, pairs=mla)


def _ramp(yarn: YarnConfig, theta: float, dim: int, *, truncate: bool) -> np.ndarray:
    """0 where a channel turns fast and stays, 1 where it is interpolated."""

    def turns(count: float) -> float:
        return dim * log(yarn.original / (2 * pi * count)) / (2 * log(theta))

    low, high = turns(yarn.beta_fast), turns(yarn.beta_slow)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1 if factor > 1 else 1.0


def _gqa_factor(yarn: YarnConfig) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1)


def _mla_factors(yarn: YarnConfig) -> tuple[float, float]:
    """Of the rotated channels and of the softmax; the only attention factor that means anything here is 1."""
    mscale = 1.0 if yarn.mscale is None else yarn.mscale
    everywhere = _mscale(yarn.factor, yarn.mscale_all_dim or 0.0)
    softmax = 1.0 if yarn.attention_factor == 1 else everywhere**2
    return _mscale(yarn.factor, mscale) / everywhere, softmax
