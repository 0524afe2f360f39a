"""Text and vision halves in one checkpoint, released and converted, cut and whole."""

import json
import shutil

import numpy as np
import pytest

import kimi_jax
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.parameters import read_parameters
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.config import load_config
from kimi_jax.image_encoder import picture_settings
from kimi_jax.layers.vision import vision_only, vision_parameters
from kimi_jax.media.errors import SettingsError
from kimi_jax.media.settings import Settings, load_settings
from kimi_jax.model import abstract
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import Precision
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json, preprocessor_json, with_vision
from tests.checkpoint.models import SIZES, rewritten, stored_of, tensors_of

CUT = Layout("cut", mesh={"tensor": 2}, axes={"heads": "tensor", "vision_heads": "tensor", "vision_ffn": "tensor"})
QKV = "vision_tower.encoder.blocks.1.wqkv.weight"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("both"), with_vision(config_json(**SIZES)), tokenizer=False)


@pytest.fixture(scope="module")
def converted(released, tmp_path_factory):
    folder = tmp_path_factory.mktemp("new") / "converted"
    single = load_layout("single")
    convert(released, folder, stored_of(released), single, make_mesh(single))
    return folder


def everything(folder, layout=CUT):
    config = load_config(folder)
    stored = abstract(config, Precision(), Parallel.single())[1] | vision_parameters(config, Precision())
    return read_parameters(folder, stored, stored, layout, make_mesh(layout))


@pytest.mark.parametrize("form", ["released", "converted"])
def test_both_halves_are_read(form, released, request):
    # red when a part of wqkv is cut as one run of rows, or vision is read from text names
    params = everything(request.getfixturevalue(form))
    found = vision_only(params)
    assert len(found) == 2 + 6 * 2 + 1 + 3
    with CheckpointFolder.open(released) as opened:
        for name, array in found.items():
            np.testing.assert_array_equal(np.asarray(array).reshape(opened.info(name).shape), opened.read(name))
        whole = opened.read(QKV).reshape(3, 96, 64)
    for shard in found[QKV].addressable_shards:
        assert shard.data.shape == (3, 48, 64)
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    assert len(params) > len(found)


def test_a_tensor_of_the_tower_that_nobody_reads(released, tmp_path):
    # red when it is skipped although the tower is wanted
    name = "vision_tower.patch_embed.proj.bias"
    odd = rewritten(released, tmp_path / "odd", lambda tensors: tensors.update({name: tensors[QKV][0]}))
    with pytest.raises(CheckpointError, match=rf"{name}.* belongs to no parameter"):
        everything(odd)


def test_tensors_of_the_tower_that_are_missing(released, tmp_path):
    # red when a tower with holes is loaded, or nobody says that text would work
    def change(tensors):
        for name in [name for name in tensors if name.startswith("mm_projector.")]:
            del tensors[name]

    odd = rewritten(released, tmp_path / "odd", change)
    shutil.copy(released / "preprocessor_config.json", odd)
    with pytest.raises(CheckpointError, match=r"mm_projector\.proj\.0\.weight is missing(.|\n)*vision=False") as raised:
        kimi_jax.load(odd, max_seq_len=16)
    assert len(raised.value.problems) == 3
    text = kimi_jax.load(odd, max_seq_len=16, vision=False)
    assert text.vision is None and "without its vision tower" in text.no_vision


def test_the_way_back(released, converted, tmp_path):
    # red when the parts of wqkv are not joined again, or the tower is left behind
    export(converted, tmp_path / "back", stored_of(released))
    assert tensors_of(tmp_path / "back") == tensors_of(released)


def test_a_folder_that_does_not_say_how_pictures_are_prepared(released, tmp_path):
    # red when defaults are assumed, a model cannot be loaded for its text, or the reason is lost
    config = load_config(released)
    assert picture_settings(released, config, None) == (Settings(), "")
    (tmp_path / "config.json").touch()
    found, reason = picture_settings(tmp_path, config, None)
    assert found is None and "preprocessor_config.json" in reason
    with pytest.raises(SettingsError, match=r"with vision(.|\n)*preprocessor_config\.json"):
        picture_settings(tmp_path, config, True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_json(patch_size=16)))
    assert "patches of 16 pixels, and the tower takes 14" in picture_settings(tmp_path, config, None)[1]


def test_how_pictures_are_prepared_comes_along(released, converted):
    # red when the file is not written, or lost when a checkpoint is converted
    assert load_settings(released) == load_settings(converted) == Settings()
