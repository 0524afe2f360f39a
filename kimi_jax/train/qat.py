"""Quantisation-aware training: the forward pass runs on what the checkpoint will hold, gradients change float32 masters.

Routed experts are projected onto MXFP4 (``quant/mxfp4``: exponent ``clamp(ceil(log2(amax / 6)), -126, 125)``, round to nearest
even); every tensor that the checkpoint stores as bfloat16 is rounded to it. Both pass the gradient straight through (training
notes, "MXFP4 QAT"). So an exported checkpoint computes what was trained, and exporting it again gives the same bytes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.precision import BFLOAT16, FLOAT32
from kimi_jax.quant import mxfp4

EXPERT = ".block_sparse_moe.experts."
"""Part of the names of what is stored as MXFP4."""


@jax.custom_vjp
def mxfp4_through(master: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """The master's projection onto MXFP4; its gradient is the projection's."""
    return mxfp4.project(master)


@jax.custom_vjp
def bfloat16_through(master: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The master rounded to bfloat16, still float32; its gradient is the rounded value's."""
    return lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)


def _forward(function: Any) -> Any:
    return lambda master: (function(master), None)


mxfp4_through.defvjp(_forward(mxfp4_through), lambda _, out: (out,))
bfloat16_through.defvjp(_forward(bfloat16_through), lambda _, out: (out,))


def as_stored(
    masters: Mapping[str, Array], stored: Mapping[str, ArraySpec], compute: Any = FLOAT32, *, experts: bool = True
) -> dict[str, Array]:
    """The values that a checkpoint of these masters would hold.

    Args:
      masters: float32, by dotted name.
      stored: the same parameters with the checkpoint's dtypes (experts aside).
      compute: dtype of what the checkpoint holds as bfloat16; float32 keeps the same values in a wider array.
      experts: False leaves routed experts as they are, to begin a run with or to compare with.
    """
    values = {}
    for name, master in masters.items():
        if EXPERT in name:
            values[name] = mxfp4_through(master) if experts else master
        elif name in stored and stored[name].dtype == BFLOAT16:
            values[name] = bfloat16_through(master) if compute == FLOAT32 else master.astype(compute)
        else:
            values[name] = jnp.asarray(master)
    return values
