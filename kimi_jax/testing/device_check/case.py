"""One thing that is checked: its inputs, how it is called, what may differ, and what it must move and multiply."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kimi_jax.ops.implementation import Impl

BFLOAT16 = ml_dtypes.bfloat16
FLOAT8 = ml_dtypes.float8_e4m3fn

POOL = 1_048_573
"""Different random values of one array; a prime, so that no two rows of a larger one are equal."""


class Inputs(NamedTuple):
    """Arguments of a call, trees of numpy arrays.

    Attributes:
      own: read by the call.
      carried: by name; updated by the call in place and given to the next one.
      shared: of which a call reads only a part that ``own`` names, such as all experts: copies of a case have it in common.
    """

    own: Any
    carried: Mapping[str, Any] = {}
    shared: Any = None


Outputs = tuple[dict[str, Any], dict[str, Any]]
"""Results and what is carried on, each by name."""


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel's array may be from the reference's.

    Attributes:
      relative: largest difference, as a part of the reference's largest entry; 0 is every entry equal.
      reason: why not less.
    """

    relative: float
    reason: str

    def at(self, dtype: Any) -> "Tolerance":
        """What is left of a tolerance for bfloat16 where activations have this dtype."""
        return self if dtype == BFLOAT16 else SUMMED


EQUAL = Tolerance(0.0, "copied or chosen, never computed")
ROUNDED = Tolerance(2.0**-7, "one bfloat16 rounding of a float32 sum that was added in another order")
SUMMED = Tolerance(1e-5, "float32 sums in another order, and the device's own exponentials")


@dataclass(frozen=True)
class Case:
    """One kernel call of a decode step, of a verification or of a prefill chunk.

    Attributes:
      name: ``op.function/what``.
      build: inputs from a random generator; the same generator gives the same bytes.
      call: (impl, inputs) to results and carried arrays.
      tolerances: of every result and carried array, by name.
      bytes: that must be read and written once, if nothing stays in a cache.
      flops: operations.
      peak: dtype of ``placement.device.DTYPES`` whose peak the operations are held against.
      share: makes ``Inputs.shared``.
    """

    name: str
    build: Callable[[np.random.Generator], Inputs]
    call: Callable[[Impl, Inputs], Outputs]
    tolerances: Mapping[str, Tolerance]
    bytes: int
    flops: int
    peak: str
    share: Callable[[], Any] = lambda: None

    @property
    def group(self) -> str:
        """The op's folder; cases of a group share a process."""
        return self.name.partition(".")[0]

    def inputs(self, copy: int = 0) -> Inputs:
        """The inputs without what is shared; another ``copy`` has other values."""
        return self.build(np.random.default_rng([copy, *self.name.encode()]))


def normal(random: np.random.Generator, *shape: int, dtype: Any, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """Normal values; a large array repeats ``POOL`` of them."""
    values = random.standard_normal(min(int(np.prod(shape)), POOL), np.float32) * np.float32(scale)
    return np.resize(values.astype(dtype), shape)


def near_one(random: np.random.Generator, *shape: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Weights of a norm."""
    return (1 + normal(random, *shape, dtype=np.float32, scale=0.1)).astype(dtype)


def whole(random: np.random.Generator, low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
    """Bytes from ``low`` to below ``high``, repeated like those of :func:`normal`."""
    return np.resize(random.integers(low, high, min(int(np.prod(shape)), POOL), np.uint8), shape)
