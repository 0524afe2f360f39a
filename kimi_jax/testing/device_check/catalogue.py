"""Every case by name."""

from kimi_jax.testing.device_check import glue, indexer, kda, mla, moe
from kimi_jax.testing.device_check.case import Case
from kimi_jax.testing.device_check.sizes import SIZES

MODEL = "model.generate/random-tiny"
"""Name of the whole small model, which is no case: it runs as a user runs it."""


def catalogue(size: str) -> dict[str, Case]:
    """The cases at ``k3-tp8`` or ``tiny``, by name and in the order of their groups."""
    sizes = SIZES[size]
    every = [*glue.cases(sizes), *indexer.cases(sizes), *kda.cases(sizes), *mla.cases(sizes), *moe.cases(sizes)]
    return {case.name: case for case in sorted(every, key=lambda case: case.group)}


def names() -> list[str]:
    """What can be asked for."""
    return [*catalogue("tiny"), MODEL]
