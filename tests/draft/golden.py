"""The golden data of the tiny drafts."""

from functools import cache
from pathlib import Path

import numpy as np

DRAFTS = Path(__file__).parents[1] / "fixtures" / "dspark-tiny"
NAMES = ("gqa", "mla", "mla_yarn")


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(DRAFTS / "golden.npz") as arrays:
        return dict(arrays)


def cases(prefix: str) -> list[str]:
    """Names between ``prefix/`` and the next slash, in the order of the file."""
    found = (name.split("/")[1] for name in golden() if name.startswith(f"{prefix}/"))
    return list(dict.fromkeys(found))


def case(*path: object) -> dict[str, np.ndarray]:
    """The arrays under a path, by the rest of their names."""
    start = "/".join(map(str, path)) + "/"
    return {name.removeprefix(start): array for name, array in golden().items() if name.startswith(start)}
