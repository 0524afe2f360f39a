"""Products with weights stored ``[out, in]`` for XLA, in a form that a CPU multiplies fast.

XLA for CPU hands products of two or more rows to a library that reads bfloat16 weights as they are; with one row it first
writes the whole weight out as float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

FEWEST_ROWS = 4
"""Rows that bfloat16 weights meet at least; the added ones are zero. They are free: the product waits for the weights."""

TERMS = 3
"""bfloat16 numbers, of 8 significant bits each, that add up to a float32."""


def product(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    """``x @ weight.T`` in float32, exact products accumulated in float32.

    A bfloat16 ``x`` is widened for a float32 weight. For a bfloat16 weight, a float32 ``x`` is cut into three bfloat16 terms
    whose sum it is (down to 2**-133, below which parts of a value are lost), which meet the weight as rows of their own.
    """
    if weight.dtype == jnp.float32:
        return _dot(x.astype(jnp.float32), weight)
    flat = x.reshape(-1, x.shape[-1])
    if x.dtype == jnp.float32:
        terms = _dot_rows(jnp.concatenate(split(flat)), weight).reshape(TERMS, flat.shape[0], -1)
        out = terms[0] + (terms[1] + terms[2])
    else:
        out = _dot_rows(flat.astype(weight.dtype), weight)
    return out.reshape(*x.shape[:-1], -1)


def split(x: Float[Array, "*shape"]) -> list[Float[Array, "*shape"]]:
    """bfloat16 terms of float32 values, largest first."""
    terms = []
    for _ in range(TERMS):
        # not a convert there and back, which a compiler may drop as excess precision
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        terms.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return terms


def _dot_rows(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    missing = FEWEST_ROWS - x.shape[0]
    return _dot(jnp.pad(x, ((0, missing), (0, 0))), weight)[: x.shape[0]] if missing > 0 else _dot(x, weight)


def _dot(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    exact = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
