"""From the form that parameters are stored in to the form that they are kept in, where the two differ."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout
from kimi_jax.quant import mxfp4

PACKED, CODES = ".weight_packed", ".weight_codes"


def unpack_experts(
    params: Mapping[str, jax.Array], specs: Mapping[str, ArraySpec], layout: Layout, mesh: Mesh
) -> dict[str, jax.Array]:
    """Packed expert codes as one int8 a value, in place on every device; each packed array is freed as its codes appear.

    Args:
      params: placed parameters with packed experts.
      specs: the parameters as they are kept.
    """
    kept = {}
    for name, array in params.items():
        if not name.endswith(PACKED):
            kept[name] = array
            continue
        name = name.removesuffix(PACKED) + CODES
        sharding = NamedSharding(mesh, layout.spec(specs[name]))
        kept[name] = jax.block_until_ready(jax.jit(mxfp4.unpack, out_shardings=sharding)(array))
        array.delete()
    return kept
