"""Kimi-K3 in JAX: load a checkpoint, place it on a mesh, generate text.

The public face is imported on first use, so that the parts without arrays (text, config) do not pay for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.api import Completion, Kimi, load
    from kimi_jax.placement.layout import Layout
    from kimi_jax.planning.plan import Plan, plan

__version__ = "0.1.0"
__all__ = ["Completion", "Kimi", "Layout", "Plan", "__version__", "load", "plan"]

_HOMES = {
    "Completion": "kimi_jax.api",
    "Kimi": "kimi_jax.api",
    "Layout": "kimi_jax.placement.layout",
    "Plan": "kimi_jax.planning.plan",
    "load": "kimi_jax.api",
    "plan": "kimi_jax.planning.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kimi_jax' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
