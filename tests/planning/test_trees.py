"""Declared trees: names and shapes of the released checkpoints, so that planner and loader mean the same tensors."""

import json
import math

import pytest

import kimi_jax
from kimi_jax.config import load_config
from kimi_jax.draft.config import PUBLISHED, DraftError, published_draft
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.planning.ask import text_parameters
from kimi_jax.planning.parts import category_of, part_of
from kimi_jax.planning.plan import PlanError
from kimi_jax.planning.sizes import values_of
from kimi_jax.precision import Precision
from kimi_jax.quant.fp8_policy import Fp8Error, form_problems, fp8_policy


@pytest.fixture(scope="module")
def listed(fixtures):
    """Every tensor of the released list by name, blocks and layers filled in, experts stacked: (shape, category)."""
    found = {}
    for row in json.loads((fixtures / "tensors-kimi-k3.json").read_text()):
        for layer in row["layers"] or [0]:
            pattern = row["pattern"].replace("{L}", str(layer))
            stacked = ".experts.{E}." in pattern
            shape = ([896] if stacked else []) + row["shape"]
            blocks = range(27) if "{B}" in pattern else [0]
            for block in blocks:
                name = pattern.replace("{B}", str(block)).replace(".{E}.", ".").removeprefix("language_model.")
                found[name] = (tuple(shape), row["category"])
    return found


def test_the_text_tree_is_the_released_list(listed):
    # Red when a name, a shape or a category differs from the release.
    config = load_config("k3")
    mine = text_parameters(config, Precision())
    theirs = {name: found for name, found in listed.items() if found[1] != "vision"}
    assert set(mine) == set(theirs)
    for name, (shape, category) in theirs.items():
        assert mine[name].shape == ((96,) if name.endswith("A_log") else shape), name
        assert category_of(name, config) == category, name


def test_the_vision_tree_is_the_released_list(listed):
    # Red when one of the 168 names differs, or a shape holds other values.
    theirs = {name: shape for name, (shape, category) in listed.items() if category == "vision"}
    mine = vision_parameters(load_config("k3"), Precision())
    assert len(mine) == 168 and set(mine) == set(theirs)
    for name, shape in theirs.items():
        assert mine[name].shape == ((3, 1536, 1024) if "wqkv" in name else shape), name
    counts = {
        prefix: sum(math.prod(spec.shape) for name, spec in mine.items() if name.startswith(prefix))
        for prefix in ("vision_tower", "mm_projector")
    }
    assert counts == {"vision_tower": 401_214_464, "mm_projector": 46_144_512}


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("k3-mla", 67, 2_387_907_841), ("k3.1-gqa", 62, 2_249_289_601), ("k3.1-mla", 67, 2_686_752_257)],
)
def test_draft_trees(name, tensors, parameters):
    # Red when a tensor is missing: with the embedding, k3-mla has the published 68 tensors and 3.562 B parameters.
    tree = draft_parameters(PUBLISHED[name], Precision())
    assert (len(tree), sum(values_of(key, spec) for key, spec in tree.items())) == (tensors, parameters)
    if name == "k3-mla":
        assert parameters + 163840 * 7168 == 3_562_312_961


def test_draft_names():
    # Red when the two backbones share a name that their checkpoints do not.
    grouped = draft_parameters(PUBLISHED["k3.1-gqa"], Precision())
    latent = draft_parameters(PUBLISHED["k3.1-mla"], Precision())
    shared = {"markov_head.markov_w1.weight", "confidence_head.proj.bias", "layers.4.mlp.down_proj.weight"}
    assert shared <= set(grouped) & set(latent)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.k_norm.weight"} <= set(grouped)
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight"} <= set(latent)
    assert grouped["fc.weight"].shape == latent["context_proj.weight"].shape == (7168, 35840)
    assert latent["layers.0.self_attn.q_b_proj.weight"].shape == (18432, 1536)
    with pytest.raises(DraftError, match=r"known: k3-mla, k3\.1-gqa, k3\.1-mla"):
        published_draft("k4")


def test_fp8_treats_the_published_groups_and_nothing_else():
    # Red when a pattern covers too much or too little, or a scale is not cut like the outputs.
    config = load_config("k3.1-pro")
    plain = text_parameters(config, Precision())
    treated = text_parameters(config, Precision(), fp8_policy("ptpc"))
    narrow = {name for name in plain if treated[name].dtype.itemsize == 1 != plain[name].dtype.itemsize}
    kinds = {part_of(name, config) for name in narrow}
    assert kinds == {"kda_projections", "mla_projections", "dense_mlp", "shared_experts", "indexer"}
    assert {name.split("self_attn.")[-1] for name in narrow if "indexer" in name} == {"indexer.wq_b.weight"}
    assert len(narrow) == 69 * 8 + 24 * 6 + 93 * 3 + 24
    scales = set(treated) - set(plain)
    assert scales == {f"{name}_scale" for name in narrow}
    for name in narrow:
        scale = treated[f"{name}_scale"]
        assert (scale.shape, scale.axes, scale.dtype.name) == (plain[name].shape[:1], plain[name].axes[:1], "float32")
        assert part_of(f"{name}_scale", config) == part_of(name, config)


@pytest.mark.parametrize("text", ["none", "ptpc", "ptpc+head", "attention", "ptpc+latent+router+head", "latent+head"])
def test_a_policy_reads_its_own_name(text):
    # Red when a name cannot be given back to the planner.
    assert fp8_policy(fp8_policy(text).name) == fp8_policy(text)
    assert set(fp8_policy(text).name.split("+")) == set(text.split("+"))


def test_policies_that_are_wrong_name_all_words():
    # Red when the first unknown word hides the second.
    with pytest.raises(Fp8Error) as caught:
        fp8_policy("ptpc+haed+routed")
    assert len(caught.value.problems) == 2 and "latent" in caught.value.hint


def test_the_other_form_of_fp8_is_refused():
    # Red when codes of one form would be multiplied as the other (PF-76), or a device without FP8 weights is refused.
    for target in ("gfx942", "gfx942:sramecc+:xnack-"):
        (problem,) = form_problems(fp8_policy("ptpc"), target, "mi300x")
        assert "e4m3fnuz" in problem and "mi355x" in problem
    assert (
        form_problems(fp8_policy("ptpc"), "gfx950", "mi355x") == form_problems(fp8_policy("none"), "gfx942", "x") == []
    )
    with pytest.raises(PlanError, match="e4m3fnuz"):
        kimi_jax.plan("k3", "tp8", "mi300x", 1024, fp8="ptpc")


def test_a_parameter_without_a_place_is_an_error():
    # Red when an unknown name lands in some row silently.
    with pytest.raises(ValueError, match="belongs to no part"):
        part_of("model.layers.0.new_thing.weight", load_config("k3"))
