"""Parameters as an FP8 treatment leaves them in memory: codes, and one float32 scale per output channel beside them."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.precision import FLOAT32
from kimi_jax.quant.fp8_policy import Fp8Policy

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def requantised(
    parameters: Mapping[str, ArraySpec], policy: Fp8Policy, form: np.dtype[Any] = E4M3
) -> dict[str, ArraySpec]:
    """The parameters under a treatment.

    ``W[out, in]`` becomes ``weight`` in FP8, cut as before, and ``weight_scale`` [out] float32, cut like the outputs.
    """
    treated: dict[str, ArraySpec] = {}
    for name, spec in parameters.items():
        if not policy.covers(name):
            treated[name] = spec
            continue
        treated[name] = ArraySpec(spec.shape, form, spec.axes, spec.logical)
        treated[f"{name}_scale"] = ArraySpec(spec.shape[:1], FLOAT32, spec.axes[:1], spec.logical[:1])
    return treated
