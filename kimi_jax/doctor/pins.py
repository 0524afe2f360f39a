"""What this project asks to have installed, read from its own declaration: no second list of versions."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = "kimi-jax"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """A declaration.

    Attributes:
      python: versions of Python that it runs on, as a specifier (">=3.11").
      requirements: one line each, those of extras with the extra in their marker.
    """

    python: str
    requirements: tuple[str, ...]

    def pins(self, python: str, extras: Sequence[str] = ()) -> dict[str, str]:
        """Distributions with one exact version on a Python ("3.12") with some extras: name -> version."""
        found = {}
        for line in self.requirements:
            asked = Requirement(line)
            exact = [each.version for each in asked.specifier if each.operator == "=="]
            wanted = ({"python_version": python, "extra": extra} for extra in ("", *extras))
            if exact and (asked.marker is None or any(asked.marker.evaluate(each) for each in wanted)):
                found[asked.name] = exact[0]
        return found


def declared(checkout: Path = CHECKOUT) -> Project:
    """The declaration: pyproject.toml in a checkout, which an editable install may lag behind; else the installed one."""
    file = checkout / "pyproject.toml"
    if not file.is_file():
        found = metadata.metadata(PROJECT)
        return Project(found["Requires-Python"] or "", tuple(metadata.requires(PROJECT) or ()))
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        lines += [_with_extra(line, extra) for line in requirements]
    return Project(project["requires-python"], tuple(lines))


def _with_extra(line: str, extra: str) -> str:
    """A requirement of an extra as installed metadata writes it."""
    asked, _, marker = line.partition(";")
    return f'{asked}; ({marker.strip()}) and extra == "{extra}"' if marker else f'{asked}; extra == "{extra}"'
