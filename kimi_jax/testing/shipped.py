"""The default model: a tiny random checkpoint made on first use, so that every command works with no download."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json, with_indexer, with_vision

RANDOM_TINY, RANDOM_TINY_VISION, RANDOM_TINY_K31 = "random-tiny", "random-tiny-vision", "random-tiny-k31"

NOTES = {
    name: f"{name} has random weights: its text is noise. Give --model FOLDER for a real checkpoint."
    for name in (RANDOM_TINY, RANDOM_TINY_VISION, RANDOM_TINY_K31)
}
"""Shipped name -> what a user must know before reading its output."""

BENCH_MODELS = {"random-mid": "mid", "random-big": "big"}
"""Benchmark models by name: random checkpoints of ``testing.configs`` sizes, made on first use (265 MB and 1.0 GB)."""

SHIPPED_MODELS = (RANDOM_TINY, RANDOM_TINY_VISION, RANDOM_TINY_K31, *BENCH_MODELS)

REVISION = 1
"""Raised whenever the bytes of a shipped model change, so that an old cached copy is not used."""


def cache_folder() -> Path:
    """Where made models are kept: the user's cache folder (XDG base directory specification)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kimi_jax"


def made_config(name: str) -> dict[str, Any] | None:
    """The config.json of a shipped model; None for any other name."""
    if name == RANDOM_TINY_VISION:
        return with_vision(config_json("tiny"))
    if name == RANDOM_TINY_K31:
        return with_indexer(config_json("tiny"))
    size = {RANDOM_TINY: "tiny", **BENCH_MODELS}.get(name)
    return None if size is None else config_json(size)


def shipped_model(name: str, cache: Path | None = None) -> Path | None:
    """The folder of a shipped model, made if it is not there yet; None for any other name.

    Made under another name and moved into place whole, so that two first runs at once are safe.
    """
    config = made_config(name)
    if config is None:
        return None
    cache = cache or cache_folder()
    target = cache / f"{name}-{REVISION}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            write_random_checkpoint(made, config)
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target
