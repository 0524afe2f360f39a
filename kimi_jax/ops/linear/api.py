"""Projections of a few rows: one launch for all weights that read the same input, with what stands before or after it.

Weights are ``[out, in]`` as the checkpoint stores them, without bias, or re-quantised (``weights.Scaled``). Every product is
accumulated in float32 and rounded once to the dtype of its result. The kernels take up to ``pallas.MOST_ROWS`` rows (decode and
verification). Longer inputs are XLA's in every implementation: there a product is bound by arithmetic, and launches no longer
count.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt16

from kimi_jax.ops import norm
from kimi_jax.ops.implementation import choose
from kimi_jax.ops.linear import pair, pallas, reference
from kimi_jax.ops.linear.weights import Factor, Matrix, Scaled


def project_many(
    x: Float[Array, "*rows in"],
    factors: Sequence[Factor],
    dtypes: Sequence[Any] | None = None,
    impl: str = "reference",
) -> list[Float[Array, "*rows _"]]:
    """``x @ weight.T`` for every weight, or the SiTU of two such products.

    The operands meet in the weight's dtype: a bfloat16 activation is widened for float32 resident weights, which changes no
    product; for FP8 weights each row of the input is rounded to FP8 with a scale of its own (``quant/fp8``), after a norm where
    there is one.

    Args:
      x: the input of all of them.
      factors: any number of output channels each.
      dtypes: of the results; that of ``x`` where omitted.
      impl: which implementation runs.
    """
    dtypes = [x.dtype] * len(factors) if dtypes is None else dtypes

    def kernel(interpret: bool) -> list[Float[Array, "*rows _"]]:
        outs = pallas.project([_flat(x)], factors, dtypes=tuple(map(np.dtype, dtypes)), interpret=interpret)
        return [out.reshape(*x.shape[:-1], -1) for out in outs]

    return _run("project_many", impl, x, partial(reference.project_many, x, factors, dtypes), kernel)


def project_words(
    x: Float[Array, "*rows in"], first: Factor, second: Factor, *others: Factor, impl: str
) -> tuple[UInt16[Array, "*rows words"], list[Float[Array, "*rows _"]]]:
    """:func:`project_many` of kernels, with the first two results ready to be sent as one array.

    Args:
      x: bfloat16.
      first: its result is float32, and two words a number by its bits, the low half first.
      second: its result is bfloat16, a word a number, and follows the first.
      others: their results are as of :func:`project_many`.

    Raises:
      ValueError: more rows than the kernel takes; ``impl`` is not a kernel's.
    """

    def kernel(interpret: bool) -> Any:
        dtypes = (np.dtype(np.float32), *(np.dtype(x.dtype) for _ in (second, *others)))
        factors = [first, second, *others]
        words, *rest = pallas.project([_flat(x)], factors, dtypes=dtypes, words=True, interpret=interpret)
        return tuple(out.reshape(*x.shape[:-1], -1) for out in (words, *rest))

    run = choose("linear.project_words", impl, {"pallas": partial(kernel, False), "interpret": partial(kernel, True)})
    if math.prod(x.shape[:-1]) > pallas.MOST_ROWS:
        raise ValueError(f"linear.project_words: {math.prod(x.shape[:-1])} rows; at most {pallas.MOST_ROWS}")
    words, *rest = run()
    return words, rest


def project_normed(
    x: Float[Array, "*rows in"],
    scale: Float[Array, " in"],
    eps: float,
    weight: Matrix,
    impl: str = "reference",
) -> Float[Array, "*rows out"]:
    """``rms_norm(x) @ weight.T``, in the dtype of ``x``.

    Args:
      x: the rows before their norm (``ops/norm``).
      scale: weight of the norm.
      eps: of the norm.
      weight: one matrix.
      impl: which implementation runs.
    """
    kernel = partial(_normed, x, scale, eps, weight)
    return _run("project_normed", impl, x, partial(reference.project_normed, x, scale, eps, weight), kernel)


def project_beside(
    left: Float[Array, "*rows left"],
    x: Float[Array, "*rows in"],
    weight: Matrix,
    impl: str = "reference",
) -> Float[Array, "*rows left+out"]:
    """``left``, rounded to the dtype of ``x``, and beside it ``x @ weight.T``: one array for one reduction."""

    def kernel(interpret: bool) -> Float[Array, "*rows left+out"]:
        (out,) = pallas.project([_flat(x)], [weight], _flat(left), dtypes=(x.dtype,), interpret=interpret)
        return out.reshape(*x.shape[:-1], -1)

    return _run("project_beside", impl, x, partial(reference.project_beside, left, x, weight), kernel)


def project_and_add(
    joined: Float[Array, "*rows in+out"],
    scale: Float[Array, " in"],
    eps: float,
    weight: Matrix,
    impl: str = "reference",
) -> Float[Array, "*rows out"]:
    """``rms_norm(x) @ weight.T + y`` of ``x`` and, beside it, ``y``; the product is rounded before it is added.

    Args:
      joined: the rows of ``x`` and ``y`` in one array, as :func:`project_beside` makes it.
      scale, eps, weight, impl: as for :func:`project_normed`.
    """
    kernel = partial(_normed, joined, scale, eps, weight)
    return _run("project_and_add", impl, joined, partial(reference.project_and_add, joined, scale, eps, weight), kernel)


def project_pair(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    eps: float,
    first: int | Int[Array, ""],
    weight: Matrix,
    y: Float[Array, "*rows in"],
    other: Matrix,
    impl: str = "reference",
) -> Float[Array, "*rows out"]:
    """``rms_norm(x)[first:] @ weight.T + y @ other.T``; each product is rounded before the sum.

    Args:
      x: whole rows, of which ``weight`` reads as many columns as it has.
      first: the first of them; may be traced.
      scale, eps, impl: as for :func:`project_normed`.
      y: rows of their own width, read by ``other``. With FP8 weights the products are separate launches.
    """

    def kernel(interpret: bool) -> Float[Array, "*rows out"]:
        if isinstance(weight, Scaled) or isinstance(other, Scaled):
            way = "interpret" if interpret else "pallas"
            part = lax.dynamic_slice_in_dim(norm.rms_norm(x, scale, eps), first, weight.shape[1], -1)
            return project_many(part, [weight], impl=way)[0] + project_many(y, [other], impl=way)[0]
        start = jnp.asarray(first, jnp.int32).reshape(1)
        out = pair.project_pair(_flat(x), scale, start, weight, _flat(y), other, eps=eps, interpret=interpret)
        return out.reshape(*x.shape[:-1], -1)

    plain = partial(reference.project_pair, x, scale, eps, first, weight, y, other)
    return _run("project_pair", impl, x, plain, kernel)


def _normed(
    x: Float[Array, "*rows in"],
    scale: Float[Array, " in"],
    eps: float,
    weight: Matrix,
    interpret: bool,
) -> Float[Array, "*rows out"]:
    inputs = [_flat(x), scale[None]]
    (out,) = pallas.project(inputs, [weight], dtypes=(x.dtype,), eps=eps, interpret=interpret)
    return out.reshape(*x.shape[:-1], -1)


def _run(op: str, impl: str, x: Array, plain: Callable[[], Any], kernel: Callable[[bool], Any]) -> Any:
    """The implementation asked for; XLA's where there are more rows than the kernel takes."""
    built = {"reference": plain, "pallas": partial(kernel, False), "interpret": partial(kernel, True)}
    chosen = choose(f"linear.{op}", impl, built)
    return chosen() if math.prod(x.shape[:-1]) <= pallas.MOST_ROWS else plain()


def _flat(x: Float[Array, "*rows width"]) -> Float[Array, "rows width"]:
    return x.reshape(-1, x.shape[-1])
