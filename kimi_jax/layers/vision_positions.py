"""Where a patch is: the learned table resampled to the picture, the fixed one of frames, and rotary angles.

Everything is computed per patch, so that pictures of any size run in one program. Source: vision notes, sections 5 and 6.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BASE = 10_000.0
"""Of the frequencies of both the frame table and the rotary angles."""


def resample(
    table: Float[Array, "rows columns hidden"],
    row: Int[Array, " patches"],
    rows: Int[Array, " patches"],
    column: Int[Array, " patches"],
    columns: Int[Array, " patches"],
) -> Float[Array, "patches hidden"]:
    """The table stretched or shrunk to each picture's grid, at each patch: bilinear between half-pixel centres, float32.

    Shrinking blends no more than two neighbours either way, as the release does.
    """
    height, width, hidden = table.shape
    upper, lower, down = _neighbours(row, rows, height)
    left, right, across = _neighbours(column, columns, width)
    flat = table.reshape(-1, hidden)

    def at(of_row: Array, of_column: Array) -> Array:
        return flat[of_row * width + of_column].astype(jnp.float32)

    above = _between(at(upper, left), at(upper, right), across)
    below = _between(at(lower, left), at(lower, right), across)
    return _between(above, below, down)


def frame_row(frame: Int[Array, " patches"], hidden: int) -> Float[Array, "patches hidden"]:
    """The fixed row of a frame of a clip: sines, then cosines, float32. Row 0 is not zero; pictures get none."""
    half = hidden // 2
    angles = frame[:, None] * BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def rotary_angles(
    row: Int[Array, " patches"], column: Int[Array, " patches"], dim: int
) -> Float[Array, "patches half_dim"]:
    """Angle of each pair of channels, float32: even pairs turn with the column, odd ones with the row."""
    frequencies = BASE ** (-4 * jnp.arange(dim // 4, dtype=jnp.float32) / dim)
    places = jnp.stack([column, row], axis=-1)[:, None, :]
    return (places * frequencies[:, None]).reshape(-1, dim // 2)


def rotate(
    x: Float[Array, "patches heads dim"], angles: Float[Array, "patches half_dim"]
) -> Float[Array, "patches heads dim"]:
    """Turns neighbouring channels ``(2j, 2j + 1)`` by their angle; float32 inside."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _neighbours(place: Array, size: Array, entries: int) -> tuple[Array, Array, Array]:
    """Entries before and behind a place of a picture's side, and how far it lies from the first to the second."""
    source = jnp.maximum((place + 0.5) * (entries / size) - 0.5, 0)
    before = jnp.floor(source).astype(jnp.int32)
    return before, jnp.minimum(before + 1, entries - 1), (source - before)[:, None]


def _between(near: Array, far: Array, share: Array) -> Array:
    return near * (1 - share) + far * share
