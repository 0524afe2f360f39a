import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_jax.api import load
from kimi_jax.checkpoint.names import Source
from kimi_jax.problems import ProblemsError
from kimi_jax.quant.mxfp4 import decode
from kimi_jax.testing.checkpoints import random_tensor, write_random_checkpoint
from kimi_jax.testing.configs import config_json
from kimi_jax.text.vocabulary import CONFIG_FILE, MODEL_FILE

SMALL = {
    "num_hidden_layers": 3,
    "full_attention": (2,),
    "hidden_size": 64,
    "kda_heads": 2,
    "num_attention_heads": 2,
    "num_experts": 5,
    "vocab_size": 520,
}
CONFIG = config_json("tiny", **SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("made") / "new", CONFIG, seed=7)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    assert digests(write_random_checkpoint(tmp_path, CONFIG, seed=7)) == digests(folder)


def test_the_same_values_in_every_process():
    source = Source(("a.weight",), (3,), "F32")
    # Changes with the recipe: then shipped.REVISION must be raised, or old copies in users' caches stay in use.
    values = [0.008247499354183674, 0.5457037687301636, -0.13256721198558807]
    np.testing.assert_allclose(
        random_tensor("a.weight", (3,), source, 7), values, rtol=1e-6
    )  # red with hash() of a name
    assert random_tensor("a.weight_packed", (6,), source, 7).tolist() == [71, 7, 57, 23, 151, 233]


def test_another_seed_changes_every_tensor_and_nothing_else(folder, tmp_path):
    other = write_random_checkpoint(tmp_path, CONFIG, seed=8)
    one, two = tensors(folder), tensors(other)
    assert one.keys() == two.keys()
    assert [name for name in one if np.array_equal(one[name], two[name])] == []
    changed = {name for name, digest in digests(folder).items() if digests(other)[name] != digest}
    assert all(name.endswith(".safetensors") for name in changed)


def test_a_tensor_depends_on_its_own_name_alone(folder, tmp_path):
    more = tensors(write_random_checkpoint(tmp_path, config_json("tiny", **{**SMALL, "num_hidden_layers": 4}), seed=7))
    for name, values in tensors(folder).items():
        np.testing.assert_array_equal(values, more[name])  # red when one generator makes all tensors in turn


def test_no_two_tensors_are_alike(folder):
    contents = [values.tobytes() for values in tensors(folder).values() if values.size > 8]
    assert len(set(contents)) == len(contents)  # red when the name is no part of the seed


def test_released_layout(folder):
    found = tensors(folder)
    prefix = "language_model.model.layers."
    assert found[f"{prefix}0.self_attn.A_log"].shape == (10,)  # two heads and padding that must never be read
    assert (found[f"{prefix}0.self_attn.A_log"][2:] == 50).all()
    assert found[f"{prefix}1.block_sparse_moe.experts.4.w2.weight_packed"].shape == (64, 32)
    assert found[f"{prefix}1.block_sparse_moe.experts.4.w2.weight_scale"].shape == (64, 2)
    assert found[f"{prefix}1.block_sparse_moe.gate.e_score_correction_bias"].dtype == np.float32
    assert found["language_model.lm_head.weight"].dtype == "bfloat16"
    assert f"{prefix}0.mlp.up_proj.weight" in found and f"{prefix}0.block_sparse_moe.gate.weight" not in found
    assert json.loads((folder / "config.json").read_text()) == CONFIG


def test_shards_are_as_small_as_asked_for(tmp_path):
    made = write_random_checkpoint(tmp_path, CONFIG, seed=7, max_shard_bytes=200_000)
    shards = list(made.glob("*.safetensors"))
    assert len(shards) > 3
    assert max(shard.stat().st_size for shard in shards) < 220_000
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}


def test_values_keep_activations_at_their_size(folder):
    for name, values in tensors(folder).items():
        wide = values.astype(np.float32)
        assert np.isfinite(wide).all()
        if name.endswith("proj.weight") and min(wide.shape) > 8:
            assert 0.8 < wide.std() * wide.shape[1] ** 0.5 < 1.2
        if name.endswith("weight_packed"):
            scale = tensors(folder)[name.replace("packed", "scale")]
            expert = np.asarray(decode(values, scale, np.float32))
            assert 0.6 < expert.std() * expert.shape[1] ** 0.5 < 1.9  # scales are powers of two


def test_it_loads(folder):
    model = load(folder, dtype="float32")
    assert model.config.layers == 3
    assert model.tokenizer is not None and model.tokenizer.vocab_size == 520
    a_log = model.runner.params["model.layers.0.self_attn.A_log"]
    np.testing.assert_array_equal(a_log, tensors(folder)["language_model.model.layers.0.self_attn.A_log"][:2])
    assert not model.runner.allowed.all()  # unnamed reserved ids


def test_it_loads_without_a_tokenizer(tmp_path):
    made = write_random_checkpoint(tmp_path, config_json("tiny", **{**SMALL, "vocab_size": 96}), tokenizer=False)
    assert not {CONFIG_FILE, MODEL_FILE} & {path.name for path in made.iterdir()}
    model = load(made)
    assert model.tokenizer is None and model.runner.allowed.all()


def test_a_vocabulary_that_holds_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="multiples of 8 from 512"):
        write_random_checkpoint(tmp_path, config_json("tiny", **{**SMALL, "vocab_size": 96}))
    assert list(tmp_path.iterdir()) == []  # red when the weights are written first


def test_sizes_that_are_not_known_are_all_named():
    with pytest.raises(ProblemsError) as caught:
        config_json("huge", experts=3, layers=2)
    assert caught.value.problems == ("no size called 'huge'", "no such key: experts", "no such key: layers")
