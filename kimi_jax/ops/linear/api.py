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

import numpy as np
from jaxtyping import Array, Float

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.linear import pallas, reference
from kimi_jax.ops.linear.weights import Factor, Matrix


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
