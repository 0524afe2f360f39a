"""Draft checkpoints: every spelling of their config.json, everything that is refused, and tensors by name and shape."""

import json
import shutil

import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from kimi_jax.draft.config import DraftError, GqaSizes, MlaSizes
from kimi_jax.draft.config_read import load_spec, read_spec
from kimi_jax.draft.load import load_draft
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import choose_precision
from tests.draft.golden import DRAFTS, NAMES


def values(name="gqa", **changes):
    """A tiny draft's config.json with some keys changed; None takes one out."""
    found = json.loads((DRAFTS / name / "config.json").read_text())
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_drafts(name):
    # red when a tapped layer is shifted, the block counts its anchor, or the mask of a causal draft is lost
    spec = load_spec(DRAFTS / name)
    assert spec.taps == tuple(values(name)["target_layer_ids"])
    assert (spec.drafts, spec.sizes.taps, spec.sizes.eps) == (7, 5, 1e-5)
    assert spec.sizes.sees == ("past" if name == "mla_yarn" else "block")
    assert spec.stream == ("prefix" if name == "mla_yarn" else "attn_res")
    assert isinstance(spec.sizes.attention, GqaSizes if name == "gqa" else MlaSizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dspark_target_layer_ids": [2, 4, 5, 10, 12], "target_layer_ids": None},
        {"eagle_aux_hidden_state_layer_ids": [3, 5, 6, 11, 13], "target_layer_ids": None},
        {"aux_hidden_state_layer_ids": [3, 5, 6, 11, 13]},
        {"dspark_block_size": 7, "block_size": None, "dspark_noise_token_id": 381, "mask_token_id": None},
        {
            "dflash_config": {"target_layer_ids": [2, 4, 5, 10, 12], "mask_token_id": 381, "causal": False},
            "target_layer_ids": None,
            "is_causal": None,
        },
        {"rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": {**values()["rope_parameters"]}},
        {"is_neox_style": True, "rope_interleave": False, "layer_types": ["full_attention"] * 3},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_other_spellings(changes):
    # red when a convention that counts from 1 is read as 0-based, or a spelling is not known
    assert read_spec(values(**changes), "here") == read_spec(values(), "here")


REFUSED = {
    "target_layer_ids": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 10, 12]}, "is contradicted"),
    "order": ({"target_layer_ids": [4, 2, 5, 10, 12]}, "ascending"),
    "count": ({"num_target_layers": 4}, "num_target_layers = 4"),
    "block": ({"dspark_block_size": 8}, "block_size is contradicted"),
    "mask": ({"mask_token_id": 400}, "mask_token_id = 400"),
    "stream": ({"aux_hidden_stream": None}, "attn_res or prefix"),
    "vocabulary": ({"draft_vocab_size": 100}, "pruned vocabulary"),
    "width": ({"target_hidden_size": 32}, "target_hidden_size = 32"),
    "layout": ({"sample_from_anchor": False}, "anchor row"),
    "speculators": ({"aux_hidden_state_layer_ids": [3, 5, 6, 11, 13], "sample_from_anchor": None}, "anchor row"),
    "head": ({"markov_head_type": "gated"}, "markov_head_type"),
    "rotation": ({"is_neox_style": False}, "rotates halves"),
    "rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_parameters says"),
    "kind": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "only default and yarn"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "key": ({"attn_gate": True}, "attn_gate is not a known key"),
    "backbone": ({"kv_lora_rank": 24}, "grouped queries, but there is kv_lora_rank"),
    "windows": ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    # red when a contradiction is settled in silence
    changes, told = REFUSED[name]
    with pytest.raises(DraftError, match=told):
        read_spec(values(**changes), "here")


def test_all_problems_at_once_and_the_stream_as_an_option():
    # red when the first problem ends the reading, or an option overrides what the checkpoint says
    with pytest.raises(DraftError) as caught:
        read_spec(values(mask_token_id=None, hidden_act="gelu", block_size=99), "here")
    assert len(caught.value.problems) == 3
    assert read_spec(values(aux_hidden_stream=None), "here", "prefix").stream == "prefix"
    with pytest.raises(DraftError, match="prefix is asked for"):
        read_spec(values(), "here", "prefix")
    for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm"):
        with pytest.raises(DraftError, match=key):
            read_spec(values("mla", **{key: True}), "here")


def load(folder):
    layout = load_layout("single")
    mesh = make_mesh(layout)
    assert isinstance(mesh, Mesh)
    return load_draft(folder, load_spec(folder), layout, mesh, choose_precision("float32"))


def copy(tmp_path, change, **config):
    """The tiny draft with other tensors or another config.json."""
    tensors = load_file(DRAFTS / "gqa" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values(**config)))
    return tmp_path


def test_tensors_are_read_strictly(tmp_path):
    # red when a tensor may be missing, unknown, misshapen, or skipped without a word (PF-30, PF-34)
    def spoil(tensors):
        del tensors["fc.weight"]
        tensors["d2t"] = np.zeros(3, np.int32)
        tensors["norm.weight"] = np.zeros(3, np.float32)
        tensors["hidden_norm.weight"] = np.zeros(64, np.int32)

    with pytest.raises(DraftError) as caught:
        load(copy(tmp_path, spoil))
    told = str(caught.value)
    for part in (
        "fc.weight is missing; expected [64, 320]",
        "d2t",
        "norm.weight in model.safetensors has shape [3]",
        "I32",
    ):
        assert part in told
    assert len(caught.value.problems) == 4


def test_copies_are_ignored_and_listed(tmp_path):
    # red when a draft that ships the target's embedding cannot be read, or something else is skipped
    def add(tensors):
        tensors["embed_tokens.weight"] = np.zeros((384, 64), np.float32)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    loaded = load(copy(tmp_path, add))
    assert loaded.ignored == ("embed_tokens.weight", "layers.0.self_attn.rotary_emb.inv_freq")


def test_the_confidence_head_decides_by_its_width(tmp_path):
    # red when the config is believed against the tensor, or a head that is not there is made up
    def narrow(tensors):
        tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :64].copy()

    with pytest.raises(DraftError, match="confidence_head_with_markov is true"):
        load(copy(tmp_path, narrow))
    assert load(copy(tmp_path, narrow, confidence_head_with_markov=None)).spec.sizes.confidence == "hidden"
    shutil.copy(DRAFTS / "gqa" / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values(enable_confidence_head=False)))
    with pytest.raises(DraftError, match="enable_confidence_head is false"):
        load(tmp_path)
