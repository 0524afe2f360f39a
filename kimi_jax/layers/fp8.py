"""A model's projections as an FP8 treatment leaves them: one place for the steps, the loader and the planner."""

from flax import nnx

from kimi_jax.layers.linear import Linear
from kimi_jax.quant.fp8_policy import Fp8Policy


def hold_in_fp8(model: nnx.Module, policy: Fp8Policy) -> None:
    """Makes every projection that the treatment covers hold codes and scales, by its dotted path; nothing is allocated."""
    if not policy.groups:
        return
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and policy.covers(".".join(map(str, (*path, "weight")))):
            module.hold_in_fp8()
