"""The placement data is found from a checkout, an editable install and a wheel."""

import pytest

from kimi_jax.placement.files import sharding_folder


def test_the_folder_in_use_is_there():
    assert (sharding_folder() / "layouts").is_dir()


def test_a_checkout_has_it_beside_the_package(tmp_path):
    (tmp_path / "sharding" / "layouts").mkdir(parents=True)
    assert sharding_folder(tmp_path / "kimi_jax") == tmp_path / "sharding"


def test_a_wheels_own_copy_comes_first(tmp_path):
    (tmp_path / "sharding" / "layouts").mkdir(parents=True)
    (tmp_path / "kimi_jax" / "_sharding" / "layouts").mkdir(parents=True)
    assert sharding_folder(tmp_path / "kimi_jax").name == "_sharding"  # red when the checkout is looked at first


def test_a_missing_folder_names_both_places(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"_sharding/layouts nor .*sharding/layouts"):
        sharding_folder(tmp_path / "kimi_jax")
