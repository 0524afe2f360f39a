"""The configuration that a CONFIG argument names, shipped test models included."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kimi_jax.config import KimiConfig


def shipped_config(name: str) -> "KimiConfig | str":
    """A shipped test model's configuration by its name; anything else as it is."""
    from kimi_jax.testing.shipped import made_config

    config = made_config(name)
    if config is None:
        return name
    from kimi_jax.config import parse

    return parse(config, name)
