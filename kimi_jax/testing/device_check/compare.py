"""How far a kernel's arrays are from the reference's."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from kimi_jax.ops.implementation import Impl
from kimi_jax.testing.device_check.case import Case, Inputs, Tolerance


@dataclass(frozen=True)
class Difference:
    """Of one array.

    Attributes:
      array: its name.
      max_abs: largest difference; None where one of the two is not finite and the other is something else.
      max_rel: the same, as a part of the reference's largest entry (of 1 where that is zero).
      tolerance: largest ``max_rel`` that passes.
      reason: of the tolerance.
    """

    array: str
    max_abs: float | None
    max_rel: float | None
    tolerance: float
    reason: str

    @property
    def passed(self) -> bool:
        return self.max_rel is not None and self.max_rel <= self.tolerance


def compare(case: Case, impl: Impl) -> list[Difference]:
    """Runs kernel and reference on the default device and holds every array against the reference's."""
    inputs = jax.device_put(case.inputs()._replace(shared=case.share()))
    got, expected = (_run(case, inputs, which) for which in (impl, "reference"))
    return [difference(name, got[name], expected[name], limit) for name, limit in case.tolerances.items()]


def difference(name: str, got: Any, expected: Any, tolerance: Tolerance) -> Difference:
    """Of two arrays of one shape and dtype; equal entries, also infinite ones and NaN, differ by nothing.

    Raises:
      ValueError: another shape or dtype.
    """
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{name} is {got.dtype}{list(got.shape)}, the reference's {expected.dtype}{list(expected.shape)}"
        )
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    apart = np.where(same, 0.0, np.abs(np.where(same, 0.0, got) - np.where(same, 0.0, expected)))
    most = float(apart.max(initial=0.0))
    if not np.isfinite(most):
        return Difference(name, None, None, tolerance.relative, tolerance.reason)
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    return Difference(name, most, most / (largest or 1.0), tolerance.relative, tolerance.reason)


def _run(case: Case, inputs: Inputs, impl: Impl) -> Mapping[str, Any]:
    results, carried = jax.jit(partial(case.call, impl))(inputs)
    return {**results, **carried}
