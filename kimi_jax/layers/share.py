"""A long call cut over devices: each works on a run of every row's tokens (named axis ``tokens``), and parameters are those of all.

Columns are dealt, whatever is real in them: of ``N`` devices the first takes the first ``1 / N`` of the call's width. A row that is
shorter than the call leaves later devices with less, or nothing, of it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from kimi_jax.placement.collectives import Parallel

SMALLEST = 4
"""Tokens of a share from which a call is cut; below, and in decoding, every device of the axis does the same work."""


def is_cut(width: int, parallel: Parallel) -> bool:
    """Whether a call of this many tokens a row is cut: by its shape, so that all devices agree."""
    parts = parallel.size("tokens")
    return parts > 1 and width >= SMALLEST * parts


def width_of(width: int, parallel: Parallel) -> int:
    """Columns of one share of a call; the last shares may end in padding."""
    return -(-width // parallel.size("tokens"))


def own(whole: Shaped[Array, "rows tokens ..."], parallel: Parallel) -> Shaped[Array, "rows share ..."]:
    """This device's columns of a call that every device has; zeros behind its end."""
    share, width = width_of(whole.shape[1], parallel), whole.shape[1]
    padding = share * parallel.size("tokens") - width
    padded = jnp.pad(whole, [(0, 0), (0, padding), *[(0, 0)] * (whole.ndim - 2)])
    return parallel.local_slice(padded, "tokens", 1)


def counts(new: Int[Array, " rows"], share: int, parallel: Parallel) -> Int[Array, "parts rows"]:
    """Real tokens of each row in the share of every device, from those of the call."""
    first = jnp.arange(parallel.size("tokens"), dtype=new.dtype)[:, None] * share
    return jnp.clip(new - first, 0, share)
