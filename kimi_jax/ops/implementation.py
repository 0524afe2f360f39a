"""Choice of an op's implementation by argument; never by environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

Impl = Literal["reference", "pallas", "interpret"]
"""``reference``: XLA. ``pallas``: kernels for a GPU. ``interpret``: the same kernels step by step on any device, for tests."""


@dataclass(frozen=True)
class Implementations:
    """What each op of a model runs; a field per op folder."""

    attn_res: Impl = "reference"
    indexer: Impl = "reference"
    kda: Impl = "reference"
    linear: Impl = "reference"
    mla: Impl = "reference"
    moe: Impl = "reference"
    sample: Impl = "reference"

    def __str__(self) -> str:
        """One word where every op runs the same, else each op's."""
        chosen = vars(self)
        kinds = set(chosen.values())
        return kinds.pop() if len(kinds) == 1 else ", ".join(f"{op} {impl}" for op, impl in chosen.items())

    @property
    def kernels(self) -> bool:
        """Whether any op runs kernels."""
        return set(vars(self).values()) != {"reference"}

    @classmethod
    def all(cls, impl: Impl) -> "Implementations":
        """Every op the same way."""
        every: list[Impl] = [impl] * len(fields(cls))
        return cls(*every)

    @classmethod
    def of(cls, platform: str) -> "Implementations":
        """What a platform runs unless told otherwise: kernels on a GPU, XLA on everything else."""
        return cls.all("pallas" if platform in ("rocm", "cuda") else "reference")


def choose(op: str, impl: str, built: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The implementation called ``impl``.

    Raises:
      ValueError: it is not built for this op; names the ones that are.
    """
    if impl not in built:
        raise ValueError(f"{op} has no implementation {impl!r}; built: {', '.join(sorted(built))}")
    return built[impl]


def ways(reference: Callable[..., Any], kernel: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What :func:`choose` chooses from where there are both forms; the kernel takes ``interpret``."""
    return {"reference": reference, "pallas": kernel, "interpret": partial(kernel, interpret=True)}
