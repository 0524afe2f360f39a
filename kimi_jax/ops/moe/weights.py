"""Forms of the same routed experts: the checkpoint's bytes, one int8 a value for a fast CPU, and float masters in training."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, UInt8

from kimi_jax.ops import product as stored
from kimi_jax.quant import mxfp4

Planes = tuple[Float[Array, "_ _"], ...]
"""A decoded matrix: plane ``i`` of ``n`` holds columns ``i, i + n, ...``."""

Product = Callable[[Float[Array, "rows width"]], Float[Array, "rows out"]]
"""``x @ matrix^T`` in float32, for one matrix of one expert."""

BLOCK_BYTES = 256 * 1024
"""Decoded float32 bytes made and used at once; three matrices of more fall out of a CPU core's cache (half as fast)."""

BLOCK_ROWS = 64
"""Fewest rows of such a block."""


class ExpertWeights(NamedTuple):
    """Experts as the checkpoint stores them: 17/32 byte a value; w1 gate, w3 up, w2 down."""

    w1_packed: UInt8[Array, "experts ffn half_latent"]
    w1_scale: UInt8[Array, "experts ffn latent_groups"]
    w3_packed: UInt8[Array, "experts ffn half_latent"]
    w3_scale: UInt8[Array, "experts ffn latent_groups"]
    w2_packed: UInt8[Array, "experts latent half_ffn"]
    w2_scale: UInt8[Array, "experts latent ffn_groups"]

    def products(self, expert: Int[Array, ""], decoded: DTypeLike) -> list[Product]:
        """One expert's w1, w3 and w2, by even and odd columns: putting those in order costs more than the product."""
        unit, read = mxfp4.PLANE_UNIT, mxfp4.decode_planes
        return [product(codes, scale, expert, read, decoded, unit) for codes, scale in _pairs(self)]


class ExpertCodes(NamedTuple):
    """The same experts with one int8 a value (twice its E2M1 value): 33/32 byte a value, the same scale bytes."""

    w1_codes: Int8[Array, "experts ffn latent"]
    w1_scale: UInt8[Array, "experts ffn latent_groups"]
    w3_codes: Int8[Array, "experts ffn latent"]
    w3_scale: UInt8[Array, "experts ffn latent_groups"]
    w2_codes: Int8[Array, "experts latent ffn"]
    w2_scale: UInt8[Array, "experts latent ffn_groups"]

    def products(self, expert: Int[Array, ""], decoded: DTypeLike) -> list[Product]:
        """One expert's w1, w3 and w2."""
        return [product(codes, scale, expert, _one_plane, decoded) for codes, scale in _pairs(self)]


class ExpertMasters(NamedTuple):
    """The experts in training: float values, which gradients change."""

    w1: Float[Array, "experts ffn latent"]
    w3: Float[Array, "experts ffn latent"]
    w2: Float[Array, "experts latent ffn"]


def unpack(w: ExpertWeights) -> ExpertCodes:
    """The codes of packed experts; done once, at load."""
    return ExpertCodes(*(part for packed, scale in _pairs(w) for part in (mxfp4.unpack(packed), scale)))


def check(w: ExpertWeights | ExpertCodes | ExpertMasters, latent: int) -> None:
    """Whether the arrays belong together and to rows of ``latent`` values.

    Raises:
      ValueError: they do not; names every array that does not fit, its shape and the one expected.
    """
    per_entry = 2 if isinstance(w, ExpertWeights) else 1
    whole_groups = not isinstance(w, ExpertMasters)
    experts, ffn = w[0].shape[:2]
    rows = {"w1": (ffn, latent), "w3": (ffn, latent), "w2": (latent, ffn)}
    problems = []
    for name, array in w._asdict().items():
        out, inner = rows[name[:2]]
        expected = (experts, out, inner // (mxfp4.GROUP if name.endswith("scale") else per_entry))
        if array.shape != expected or (whole_groups and inner % mxfp4.GROUP):
            problems.append(
                f"{name} is {array.shape}, expected {expected} with rows of {inner} values in groups of {mxfp4.GROUP}"
            )
    if problems:
        raise ValueError(f"Experts of width {ffn} do not fit a latent of {latent}: " + "; ".join(problems))


def product(
    codes: Array,
    scale: UInt8[Array, "experts out groups"],
    expert: Int[Array, ""],
    read: Callable[[Array, UInt8[Array, "rows groups"]], Planes],
    decoded: DTypeLike,
    unit: float = 1.0,
) -> Product:
    """The product with one expert's matrix, whose planes ``read`` gives in units of ``unit``; they are multiplied as ``decoded``.

    A matrix within ``BLOCK_BYTES`` is decoded here, so once for all calls; a larger one block by block in every call.
    """
    out, width = codes.shape[1], scale.shape[2] * mxfp4.GROUP
    rows = block_rows(out, width)

    def planes(first: int | Array) -> Planes:
        sizes = [(array, (1, rows, array.shape[2])) for array in (codes, scale)]
        found = read(*(lax.dynamic_slice(array, (expert, first, 0), size)[0] for array, size in sizes))
        return tuple(plane.astype(decoded) for plane in found)

    def times(planes: Planes, x: Float[Array, "rows width"]) -> Float[Array, "rows block"]:
        parts = [stored.product(x[:, place :: len(planes)], plane) for place, plane in enumerate(planes)]
        return sum(parts[1:], parts[0]) * unit

    if rows == out:
        return partial(times, planes(0))

    def by_block(x: Float[Array, "rows width"]) -> Float[Array, "rows out"]:
        def block(index: Array, y: Array) -> Array:
            return lax.dynamic_update_slice(y, times(planes(index * rows), x), (0, index * rows))

        return lax.fori_loop(0, out // rows, block, jnp.zeros((x.shape[0], out), jnp.float32))

    return by_block


def block_rows(out: int, width: int) -> int:
    """Rows decoded at once: ``out`` halved until they fit ``BLOCK_BYTES`` or ``BLOCK_ROWS`` is reached."""
    rows = out
    while rows * width * 4 > BLOCK_BYTES and rows % (2 * BLOCK_ROWS) == 0:
        rows //= 2
    return rows


def _one_plane(codes: Int8[Array, "rows width"], scale: UInt8[Array, "rows groups"]) -> Planes:
    return (mxfp4.decode_codes(codes, scale),)


def _pairs(w: ExpertWeights | ExpertCodes) -> list[tuple[Array, Array]]:
    """Codes and scales of the three matrices."""
    return list(zip(w[0::2], w[1::2], strict=True))
