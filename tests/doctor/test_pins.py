"""The declared versions: of a checkout, and of an installed package without one."""

import pytest

from kimi_jax.doctor import pins
from kimi_jax.doctor.pins import Project, declared

INSTALLED = [
    'jax==0.10.2; python_version < "3.12"',
    "numpy<3,>=2.2",
    'jax-rocm7-pjrt==0.12.0; (python_version >= "3.12") and extra == "rocm"',
]


def test_an_installed_package_says_it_by_its_metadata(monkeypatch, tmp_path):
    monkeypatch.setattr(pins.metadata, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    monkeypatch.setattr(pins.metadata, "requires", lambda name: INSTALLED)
    found = declared(tmp_path)  # red when pyproject.toml is taken for granted
    assert found == Project(">=3.11", tuple(INSTALLED))
    assert found.pins("3.11", ("rocm",)) == {"jax": "0.10.2"}
    assert found.pins("3.12", ("rocm",)) == {"jax-rocm7-pjrt": "0.12.0"}


@pytest.mark.parametrize(("python", "jax", "plugin"), [("3.11", "0.10.2", "0.10.2"), ("3.13", "0.12.0.1", "0.12.0")])
def test_the_declaration_of_the_checkout(python, jax, plugin):
    assert declared().python == ">=3.11"
    found = declared().pins(python, ("rocm",))
    assert found["jax"] == found["jaxlib"] == jax
    assert found["jax-rocm7-plugin"] == found["jax-rocm7-pjrt"] == plugin
    assert "ruff" not in found  # red when every extra counts
