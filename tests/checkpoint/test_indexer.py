"""Tensors of the sparse indexer (K3.1 Pro): on every full-attention layer and nowhere else, with or without a bias of the keys."""

import json

import numpy as np
import pytest

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json, with_indexer
from tests.checkpoint.models import KDA, MLA, SIZES, assert_same, loaded, nothing_left, rewritten, stored_of, tensors_of
from tests.checkpoint.test_converted import converted
from tests.checkpoint.test_export import back

BIAS = f"{MLA}.indexer.k_norm.bias"
KEPT = "model.layers.1.self_attn.indexer.k_norm.bias"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two layers, of which the second chooses."""
    folder = tmp_path_factory.mktemp("released") / "small"
    config = with_indexer(config_json(**SIZES), index_n_heads=3, index_head_dim=6)
    return write_random_checkpoint(folder, config, tokenizer=False, max_shard_bytes=40_000)


def problems(folder, layout="single") -> tuple[str, ...]:
    with nothing_left(), pytest.raises(CheckpointError) as caught:
        loaded(folder, layout)
    return caught.value.problems


def test_a_missing_bias_is_zero_and_said_so(source, tmp_path):
    # red when the bias is demanded, invented, or its absence goes unmentioned; or a conversion loses that it was absent
    bare = rewritten(source, tmp_path / "bare", lambda tensors: tensors.pop(BIAS))
    with pytest.warns(UserWarning, match=r"none of the 1 indexers has a k_norm\.bias: zero is used"):
        params = loaded(bare, "tp8")
    assert params[KEPT].shape == (6,) and not np.asarray(params[KEPT]).any()
    assert {name for name, array in loaded(source, "tp8").items() if not np.array_equal(array, params[name])} == {KEPT}
    folder = converted(bare, tmp_path / "new")
    with pytest.warns(UserWarning, match="zero is used"):
        assert_same(loaded(folder, "tp8"), params)
    assert tensors_of(back(folder, tmp_path / "back")) == tensors_of(bare)


def test_a_bias_that_is_there_is_used(source, tmp_path):
    # red when every bias is taken for zero
    assert np.asarray(loaded(source)[KEPT]).any()
    assert_same(loaded(converted(source, tmp_path / "new"), "tp8"), loaded(source, "tp8"))


def test_some_biases_are_not_enough(tmp_path):
    # red when one lost tensor of several is taken for zero
    config = with_indexer(config_json(**{**SIZES, "num_hidden_layers": 3, "full_attention": (2, 3)}))
    folder = write_random_checkpoint(tmp_path / "three", config, tokenizer=False)
    half = rewritten(folder, tmp_path / "half", lambda tensors: tensors.pop(BIAS))
    assert problems(half) == (f"{BIAS} is missing; expected BF16 [32]",)


@pytest.mark.parametrize("name", ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight"])
def test_every_other_tensor_must_be_there(source, tmp_path, name):
    # red when a layer without its indexer loads, and then runs dense
    folder = rewritten(source, tmp_path / "less", lambda tensors: tensors.pop(f"{MLA}.indexer.{name}"))
    assert problems(folder)[0].startswith(f"{MLA}.indexer.{name} is missing")


def test_none_on_a_linear_layer_and_none_in_kimi_k3(source, tmp_path):
    # red when an indexer that no layer has is left unread
    def add(tensors):
        tensors[f"{KDA}.indexer.wk.weight"] = tensors[f"{MLA}.indexer.wk.weight"]

    more = rewritten(source, tmp_path / "more", add)
    assert problems(more)[0].endswith("belongs to no parameter") and KDA in problems(more)[0]
    plain = rewritten(source, tmp_path / "plain", lambda tensors: None)
    (plain / "config.json").write_text(json.dumps(config_json(**SIZES)))
    assert len(problems(plain)) == 5
    assert not [name for name in stored_of(plain) if "indexer" in name]


def test_shapes_are_checked(source, tmp_path):
    # red when heads and width of the queries may be anything whose product fits
    def widen(tensors):
        name = f"{MLA}.indexer.weights_proj.weight"
        tensors[name] = np.repeat(tensors[name], 2, axis=0)

    assert "has shape [6, 32]; expected [3, 32]" in problems(rewritten(source, tmp_path / "wide", widen))[0]
