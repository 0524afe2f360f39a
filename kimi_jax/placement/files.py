"""Where the declared placement (the `sharding/` data folder) lies on disk."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def sharding_folder(package: Path = PACKAGE) -> Path:
    """The folder that holds `layouts/`, `devices/` and `budgets/`.

    An installed wheel carries the folder inside the package as `_sharding`; a checkout and an editable install have it
    beside the package as `sharding`.

    Args:
      package: the folder of the `kimi_jax` package.

    Raises:
      FileNotFoundError: neither place holds the folder.
    """
    shipped, checkout = package / "_sharding", package.parent / "sharding"
    # The wheel's own copy first: beside an installed package, `sharding` would be somebody else's module.
    for folder in (shipped, checkout):
        if (folder / "layouts").is_dir():
            return folder
    raise FileNotFoundError(f"no placement data in {shipped}/layouts nor {checkout}/layouts; reinstall kimi-jax")


def shipped_names(kind: str) -> list[str]:
    """Names of the shipped files of a kind, "layouts" or "devices"."""
    return sorted(path.stem for path in (sharding_folder() / kind).glob("*.toml"))
