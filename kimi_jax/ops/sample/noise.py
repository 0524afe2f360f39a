"""Counter-based noise: one number per (seed, position, token id), the same on every layout."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32


def gumbel(
    seeds: UInt32[Array, " rows"], positions: Int[Array, " rows"], offset: Int[Array, ""] | int, width: int
) -> Float[Array, "rows width"]:
    """Standard Gumbel noise for token ids ``offset .. offset + width - 1`` of each row, float32."""
    ids = (offset + jnp.arange(width)).astype(jnp.uint32)
    # the cipher pairs the two halves of its counts: zeros as the second half make each id's word depend on that id alone
    counts = jnp.concatenate([ids, jnp.zeros_like(ids)])

    def row(seed: UInt32[Array, ""], position: Int[Array, ""]) -> Float[Array, " width"]:
        key = jnp.stack([seed, position.astype(jnp.uint32)])
        bits = threefry_2x32(key, counts)[:width]
        # large noise comes from small uniforms, where float32 is fine; 1 itself would make an infinite one
        uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-uniform))

    return jax.vmap(row)(seeds, positions)
