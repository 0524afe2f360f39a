"""Sizes of the tiles of a kernel, fitted to a matrix; all are powers of two, as Triton wants them."""

from dataclasses import dataclass, replace
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from kimi_jax.quant.mxfp4 import GROUP


@dataclass(frozen=True)
class TilePlan:
    """What one program takes of a matrix ``[out, inner]``.

    Attributes:
      columns: outputs of a program.
      inner: values along the sum in one step.
      warps: wavefronts that share a program.
      stages: steps whose loads are under way at once.
    """

    columns: int
    inner: int
    warps: int
    stages: int = 2

    def fit(self, out: int, inner: int) -> "TilePlan":
        """The same with sizes that divide the matrix; both sides of every expert matrix are multiples of 32."""
        return replace(self, columns=dividing(out, self.columns), inner=dividing(inner, self.inner))

    def packed(self, step: Int[Array, ""]) -> Any:
        """The slice of code bytes of a step."""
        return pl.ds(step * (self.inner // 2), self.inner // 2)

    def scales(self, step: Int[Array, ""]) -> Any:
        """The slice of scale bytes of a step."""
        return pl.ds(step * (self.inner // GROUP), self.inner // GROUP)

    def options(self, interpret: bool) -> dict[str, Any]:
        """``options`` of this plan."""
        return options(self.warps, self.stages, interpret)


def options(warps: int, stages: int, interpret: bool) -> dict[str, Any]:
    """How ``pallas_call`` compiles a kernel, or runs it step by step."""
    if interpret:
        return {"interpret": True}
    return {"compiler_params": plt.CompilerParams(num_warps=warps, num_stages=stages)}


def dividing(size: int, limit: int) -> int:
    """The largest power of two that divides ``size``, at most ``limit``."""
    return min(size & -size, limit)


def power_of_two(size: int) -> int:
    """The smallest power of two that holds ``size``."""
    return 1 << (size - 1).bit_length()
