"""The public face: there without JAX, filled in on first use."""

import subprocess
import sys

import pytest

import kimi_jax


def test_importing_the_package_does_not_import_jax():
    probe = "import kimi_jax, sys; dir(kimi_jax); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"  # red when the face imports kimi_jax.api at its top


@pytest.mark.parametrize("name", kimi_jax.__all__)
def test_every_promised_name_is_there(name):
    assert getattr(kimi_jax, name) is not None  # red when a home in the table is misspelt
    assert name in dir(kimi_jax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        kimi_jax.fly  # noqa: B018


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
def test_text_needs_no_image_library(verb):
    # red when a module on the way to a text model imports Pillow, or something of the server's, at its top
    extras = ("PIL",) if verb == "serve" else ("PIL", "starlette", "uvicorn", "llguidance")
    probe = f"import sys; sys.modules.update(dict.fromkeys({extras})); import kimi_jax.api, kimi_jax.cli.{verb}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
