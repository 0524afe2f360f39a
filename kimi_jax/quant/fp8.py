"""FP8 e4m3 with one float32 scale per row: of a weight ``[out, in]`` per output channel, of activations per token.

Both halves of the published treatment ("ptpc", K3.1 Pro notes section 9) are this one codec:

    s[r] = max_i |x[r, i]| / 448        x8 = cast_e4m3(x / s)        y[t, o] = (x8 . W8)[t, o] * s_x[t] * s_w[o]

The form is OCP e4m3fn (largest value 448, no infinity, byte 0x80 is -0), which gfx950 multiplies. The fnuz form of gfx942 has
another exponent bias and 0x80 is its NaN: bytes of one must never be read as the other.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

LARGEST = 448.0
"""1.75 * 2**8 (OCP 8-bit Floating Point Specification, table 1)."""

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Scale of a row of zeros, so that nothing is divided by zero; also the least that is not flushed to zero."""


def row_scales(x: Float[Array, "*rows width"]) -> Float[Array, "*rows"]:
    """The scale of every row, float32: NaN or infinite where the row holds such a value."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / LARGEST, SMALLEST_SCALE)


def to_codes(x: Float[Array, "*rows width"], scales: Float[Array, "*rows"]) -> Float[Array, "*rows width"]:
    """Rows divided by their scales, rounded to the nearest e4m3fn value (ties to even)."""
    return (x.astype(jnp.float32) / scales[..., None]).astype(E4M3)


def quantise(x: Float[Array, "*rows width"]) -> tuple[Float[Array, "*rows width"], Float[Array, "*rows"]]:
    """Codes and scales of rows."""
    scales = row_scales(x)
    return to_codes(x, scales), scales
