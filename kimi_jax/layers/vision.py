"""MoonViT tower and projector, written in local view. Source: vision notes, sections 4 to 8.

Patches of several pictures come in one pack (``media/packing``), the four of a token together: merging is then a reshape.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import KimiConfig, VisionConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import declared, param
from kimi_jax.layers.vision_positions import frame_row, resample, rotary_angles, rotate
from kimi_jax.media.packing import SQUARE, Packed
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.packed_attention import attend
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision

COLOURS = 3

NORM_EPS = 2.0**-23
"""The tower's norms are built without an epsilon, which means that of float32 (vision notes, section 6)."""

SINGLE = Parallel.single()


class Norm(RmsNorm):
    """In the tower's order of rounding: weighted in float32, rounded once."""

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


class Weight(nnx.Module):
    """A named array that is neither a projection nor a norm."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], precision: Precision, logical: tuple[int, ...] = ()
    ) -> None:
        self.weight = param(shape, precision.operand, axes, logical or shape)

    def project(self, x: Float[Array, "*rows in"], inner: int) -> Float[Array, "*rows out"]:
        """The product with the array seen as ``[out, inner]``."""
        (out,) = linear_op.project_many(x, [self.weight[...].reshape(-1, inner)])
        return out


class PatchEmbed(nnx.Module):
    """One product per patch, and the learned table of positions."""

    def __init__(self, vision: VisionConfig, precision: Precision) -> None:
        kernel = (vision.hidden, COLOURS, vision.patch, vision.patch)
        table = (vision.position_rows, vision.position_columns, vision.hidden)
        self.proj = Weight(kernel, (None,) * 4, precision)
        self.pos_emb = Weight(table, (None,) * 3, precision)

    def __call__(self, packed: Packed, dtype: Any) -> Float[Array, "patches hidden"]:
        table = self.pos_emb.weight[...]
        place = resample(table, packed.row, packed.rows, packed.column, packed.columns)
        clip = (packed.frames > 1)[:, None]
        place = place + jnp.where(clip, frame_row(packed.frame, table.shape[-1]), 0)
        patches = packed.patches.astype(dtype)
        return self.proj.project(patches, patches.shape[-1]) + place.astype(dtype)


class BlockMlp(nnx.Module):
    """Two products around a GELU; not gated. The result is this rank's partial sum over ``vision_ffn``."""

    def __init__(self, vision: VisionConfig, precision: Precision) -> None:
        self.fc0 = Linear(vision.mlp_width, vision.hidden, ("vision_ffn", None), precision)
        self.fc1 = Linear(vision.hidden, vision.mlp_width, (None, "vision_ffn"), precision)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "patches hidden"]:
        return self.fc1(_gelu(self.fc0(x), approximate=True))


class Block(nnx.Module):
    """One pre-norm encoder block.

    ``wqkv`` is the stored [3 * heads * dim, hidden] seen as [3, heads * dim, hidden]: the same bytes, and a cut by
    heads then takes the same heads of q, k and v.
    """

    def __init__(self, vision: VisionConfig, precision: Precision, parallel: Parallel) -> None:
        width, heads, hidden = vision.qkv_width, vision.heads, vision.hidden
        self.norm0 = Norm(hidden, NORM_EPS, precision)
        self.wqkv = Weight((3, width, hidden), (None, "vision_heads", None), precision, (3, heads, hidden))
        self.wo = Linear(hidden, width, (None, "vision_heads"), precision, (hidden, heads))
        self.norm1 = Norm(hidden, NORM_EPS, precision)
        self.mlp = BlockMlp(vision, precision)
        self.dim, self.parallel = width // heads, parallel

    def __call__(
        self,
        x: Float[Array, "patches hidden"],
        angles: Float[Array, "patches half_dim"],
        first: Int[Array, " patches"],
        end: Int[Array, " patches"],
        block: int,
    ) -> Float[Array, "patches hidden"]:
        """Every patch sees all patches of its own picture, its padding included.

        Args:
          angles: of the rotary pairs.
          first, end: bounds of each patch's picture in the pack.
          block: patches that meet at a time.
        """
        qkv = self.wqkv.project(self.norm0(x), x.shape[-1]).reshape(x.shape[0], 3, -1, self.dim)
        query, key = rotate(qkv[:, 0], angles), rotate(qkv[:, 1], angles)
        heads = attend(query, key, qkv[:, 2], first, end, block)
        x = x + self.parallel.psum(self.wo(heads.reshape(x.shape[0], -1)), "vision_heads")
        return x + self.parallel.psum(self.mlp(self.norm1(x)), "vision_ffn")


class Encoder(nnx.Module):
    """The blocks and the norm after them."""

    def __init__(self, vision: VisionConfig, precision: Precision, parallel: Parallel) -> None:
        self.blocks = nnx.List([Block(vision, precision, parallel) for _ in range(vision.layers)])
        self.final_layernorm = Norm(vision.hidden, NORM_EPS, precision)


class Tower(nnx.Module):
    """Names mirror the checkpoint's ``vision_tower.*``."""

    def __init__(self, vision: VisionConfig, precision: Precision, parallel: Parallel) -> None:
        self.patch_embed = PatchEmbed(vision, precision)
        self.encoder = Encoder(vision, precision, parallel)
        self.dim, self.dtype = vision.qkv_width // vision.heads, precision.activation

    def __call__(self, packed: Packed, block: int) -> Float[Array, "patches hidden"]:
        angles = rotary_angles(packed.row, packed.column, self.dim)
        x = self.patch_embed(packed, self.dtype)
        for layer in self.encoder.blocks:
            x = layer(x, angles, packed.first, packed.end, block)
        return self.encoder.final_layernorm(x)


class Gelu(nnx.Module):
    """Holds the place of the activation, so that the products around it keep the numbers of their names."""


class Projector(nnx.Module):
    """Names mirror the checkpoint's ``mm_projector.*``; the text model's width comes out."""

    def __init__(self, vision: VisionConfig, precision: Precision, parallel: Parallel) -> None:
        inner = SQUARE * vision.projector_width
        first = Linear(inner, SQUARE * vision.hidden, ("vision_ffn", None), precision)
        second = Linear(vision.text_hidden, inner, ("embed", "vision_ffn"), precision)
        self.proj = nnx.List([first, Gelu(), second])
        self.post_norm = Norm(vision.text_hidden, vision.projector_eps, precision)
        self.parallel = parallel

    def __call__(self, merged: Float[Array, "tokens four_hidden"]) -> Float[Array, "tokens embed"]:
        first, _, second = self.proj
        inner = _gelu(first(merged), approximate=False)
        return self.post_norm(self.parallel.psum(second(inner), "vision_ffn"))


class Vision(nnx.Module):
    """Everything between patches and the rows that take the place of image tokens.

    Args:
      parallel: how ``vision_heads`` and ``vision_ffn`` are cut; ``images`` is the caller's affair.
    """

    def __init__(self, vision: VisionConfig, precision: Precision, parallel: Parallel = SINGLE) -> None:
        self.vision_tower = Tower(vision, precision, parallel)
        self.mm_projector = Projector(vision, precision, parallel)

    def __call__(self, packed: Packed, block: int) -> Float[Array, "tokens embed"]:
        """Rows of all pictures of one pack, in order; finite and without meaning behind the last of them.

        Args:
          packed: arrays of one pack, without a leading dim.
          block: patches that meet in attention at a time; divides those of the pack.
        """
        return self.mm_projector(merge_squares(self.vision_tower(packed, block), packed.token))


def merge_squares(
    x: Float[Array, "patches hidden"], token: Int[Array, " squares"]
) -> Float[Array, "squares four_hidden"]:
    """The four patches of each token side by side, the mean over the frames of a clip; zeros where there is no token."""
    squares = x.reshape(token.shape[0], -1)
    total = jax.ops.segment_sum(squares.astype(jnp.float32), token, token.shape[0])
    frames = jax.ops.segment_sum(jnp.ones(token.shape, jnp.float32), token, token.shape[0])
    return (total / jnp.maximum(frames, 1)[:, None]).astype(x.dtype)


def vision_parameters(config: KimiConfig, precision: Precision) -> dict[str, ArraySpec]:
    """The tower and the projector by checkpoint name; nothing where the model has no vision."""
    return {} if config.vision is None else declared(Vision(config.vision, precision))


def vision_only(params: Mapping[str, Any]) -> dict[str, Any]:
    """The tower's and the projector's among the parameters of a whole model."""
    return {name: value for name, value in params.items() if name.startswith(("vision_tower.", "mm_projector."))}


def _gelu(x: Float[Array, "*rows width"], *, approximate: bool) -> Float[Array, "*rows width"]:
    """In float32, rounded once; the tanh form where ``approximate``, else that of the error function."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)
