"""From the form that parameters are stored in to the form that they are kept in, where the two differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.strict_json import limited
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout
from kimi_jax.quant import fp8, mxfp4
from kimi_jax.quant.fp8_policy import Fp8Policy

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


@dataclass(frozen=True)
class Requantiser:
    """Makes FP8 codes and scales of covered parameters as each lands: a device never holds more than one of them twice.

    The scale of an output channel is that of its whole row, also where a layout cuts the row (``o_proj``, ``down_proj``): every
    layout gives the same codes, and partial products can be added after scaling.

    Attributes:
      policy: which parameters.
      specs: parameters as they are kept, scales included.
      layout, mesh: where they lie.
    """

    policy: Fp8Policy
    specs: Mapping[str, ArraySpec]
    layout: Layout
    mesh: Mesh

    def __call__(self, name: str, array: jax.Array) -> dict[str, jax.Array]:
        """The arrays that are kept in place of ``array``, which is freed where it is not one of them.

        Raises:
          CheckpointError: it holds NaN or infinity, which a scale would spread over a whole channel; names the rows.
        """
        if not self.policy.covers(name):
            return {name: array}
        scale_name = f"{name}_scale"
        placed = [NamedSharding(self.mesh, self.layout.spec(self.specs[kept])) for kept in (name, scale_name)]
        try:
            # two programs: in one, a CPU would write the whole weight out as float32 between them
            scales = _compiled(fp8.row_scales, placed[1])(array)
            _check(name, scales)
            codes = jax.block_until_ready(_compiled(fp8.to_codes, placed[0])(array, scales))
        finally:
            array.delete()
        return {name: codes, scale_name: scales}


def _check(name: str, scales: jax.Array) -> None:
    bad = np.flatnonzero(~np.isfinite(np.asarray(scales)))
    if bad.size:
        scales.delete()  # or the traceback of the error would keep it
        raise CheckpointError(
            f"{name} cannot be held in FP8",
            limited([f"row {row} holds NaN or infinity" for row in bad]),
            "A released checkpoint holds none: fetch the file again.",
        )


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., jax.Array], sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(function, out_shardings=sharding)
