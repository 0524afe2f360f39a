"""What this machine can do, measured: bytes a second read from memory, operations a second in a product."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

READ_BYTES = 512 << 20
"""Larger than any cache that one process gets to itself."""

SIDE = 2048


@dataclass(frozen=True)
class Machine:
    """Measured limits of the device that JAX uses."""

    bandwidth: float
    peak: float


def measure_machine(operand: DTypeLike = jnp.float32, repeats: int = 5) -> Machine:
    """Best of a few runs each; a bound must not be lowered by noise. ``operand`` is what the product multiplies."""
    ones = jnp.ones((READ_BYTES // 4 // 4096, 4096), jnp.float32)
    read = jax.jit(lambda x: jnp.sum(x.reshape(-1, 16, 256).sum(1)))
    square = jnp.ones((SIDE, SIDE), operand)
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    return Machine(READ_BYTES / _best(read, repeats, ones), 2 * SIDE**3 / _best(product, repeats, square, square))


def _best(run: Callable[..., Any], repeats: int, *arguments: Any) -> float:
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)
