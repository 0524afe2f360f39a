"""The configuration that a CONFIG argument names, shipped test models included."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kimi_jax.config import KimiConfig


def shipped_config(name: str) -> "KimiConfig | str":
    """A shipped test model's configuration by its name; anything else as it is."""
    from kimi_jax.testing.shipped import BENCH_MODELS, RANDOM_TINY

    size = {RANDOM_TINY: "tiny", **BENCH_MODELS}.get(name)
    if size is None:
        return name
    from kimi_jax.config import parse
    from kimi_jax.testing.configs import config_json

    return parse(config_json(size), name)
