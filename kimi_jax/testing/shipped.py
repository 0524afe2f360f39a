"""The default model: a tiny random checkpoint made on first use, so that every command works with no download."""

import os
import shutil
import tempfile
from pathlib import Path

from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

RANDOM_TINY = "random-tiny"

NOTES = {RANDOM_TINY: "random-tiny has random weights: its text is noise. Give --model FOLDER for a real checkpoint."}
"""Shipped name -> what a user must know before reading its output."""

BENCH_MODELS = {"random-mid": "mid", "random-big": "big"}
"""Benchmark models by name: random checkpoints of ``testing.configs`` sizes, made on first use (265 MB and 1.0 GB)."""

REVISION = 1
"""Raised whenever the bytes of a shipped model change, so that an old cached copy is not used."""


def cache_folder() -> Path:
    """Where made models are kept: the user's cache folder (XDG base directory specification)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kimi_jax"


def shipped_model(name: str, cache: Path | None = None) -> Path | None:
    """The folder of a shipped model, made if it is not there yet; None for any other name.

    Made under another name and moved into place whole, so that two first runs at once are safe.
    """
    size = {RANDOM_TINY: "tiny", **BENCH_MODELS}.get(name)
    if size is None:
        return None
    cache = cache or cache_folder()
    target = cache / f"{name}-{REVISION}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            write_random_checkpoint(made, config_json(size))
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target
