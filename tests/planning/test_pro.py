"""K3.1 Pro: indexers, index keys, FP8 projections, vision and draft, counted from the trees that will run."""

import math

import pytest

import kimi_jax
from kimi_jax.cache import KdaCache, describe
from kimi_jax.config import load_config
from kimi_jax.precision import Precision


def gigabytes(plan, *rows: str) -> str:
    found = {**plan.sizes.weights, **plan.sizes.state}
    return " ".join(f"{found[row].per_device / 1e9:.3f}" for row in rows)


def test_indexers_are_replicated(pro):
    # Red when the heads of the indexer follow the heads of attention, or a tensor of it is missing.
    assert pro.sizes.weights["indexer"].arrays == 24 * 5
    assert gigabytes(pro, "indexer") == "0.357"
    names = {name.split(".indexer.")[1]: spec for name, spec in pro.ask.weights.items() if ".indexer." in name}
    assert {name: spec.shape for name, spec in names.items()} == {
        "wq_b.weight": (4096, 1536),
        "wk.weight": (128, 7168),
        "weights_proj.weight": (32, 7168),
        "k_norm.weight": (128,),
        "k_norm.bias": (128,),
    }


@pytest.mark.parametrize(("form", "bytes_per_key"), [("bfloat16", 256), ("fp8", 132), ("mxfp4", 68)])
def test_index_keys(form, bytes_per_key):
    # Red when a scale is left out, or a key of a KDA layer is kept.
    plan = kimi_jax.plan("k3.1-pro", "tp8", context=1000, index_dtype=form)
    assert plan.sizes.state["index_keys"].per_device == 24 * 1000 * bytes_per_key


def test_a_token_and_a_full_context(pro):
    # Red when the two caches of a token are not added up: 13,824 + 3,168 bytes, 17.8 GB.
    assert pro.to_json()["state"]["device_bytes_per_token"] == 16_992
    assert round(16_992 * (1 << 20) / 1e9, 1) == 17.8
    split = kimi_jax.plan("k3.1-pro", "tp8-dcp8")
    both = sum(split.sizes.state[row].per_device for row in ("latent", "index_keys"))
    assert both == 16_992 * (1 << 20) // 8  # red when the keys are not split by position


def test_models_without_an_indexer_keep_their_cache():
    # Red when K3's cache gains a leaf: compiled steps and donated buffers would change.
    cache = describe(load_config("k3"), 1, 64, Precision())
    assert all(len(entry) == 2 if isinstance(entry, KdaCache) else entry.index == () for entry in cache)


@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [
        ("k3", {"vision": "replicated"}, "205.95"),
        ("k3", {"vision": "replicated", "fp8": "ptpc"}, "199.45"),
        ("k3.1-pro", {"vision": "replicated"}, "206.31"),
        ("k3.1-pro", {"vision": "replicated", "fp8": "ptpc"}, "199.66"),
        ("k3.1-pro", {"vision": "replicated", "fp8": "attention+mlp"}, "199.81"),
    ],
)
def test_published_weight_totals(name, options, printed):
    # Red when vision, indexers or FP8 scales are miscounted, or another group is treated.
    plan = kimi_jax.plan(name, "tp8", context=64, **options)
    assert f"{plan.weight_bytes / 1e9:.2f}" == printed


def test_what_fp8_does_to_each_row():
    # Red when the treatment reaches the routed experts, the latent projections or the router.
    plan = kimi_jax.plan("k3.1-pro", "tp8", context=64, fp8="ptpc", vision="replicated")
    assert gigabytes(plan, "dense_mlp", "shared", "kda_gemm", "mla_gemm") == "0.091 1.523 3.885 1.016"
    assert gigabytes(plan, "routed", "other", "indexer", "vision") == "180.807 11.231 0.206 0.895"


def test_vision_split_cuts_what_divides():
    # Red when twelve heads are cut into eight, or the MLPs stay whole.
    plan = kimi_jax.plan("k3", "tp8", context=64, vision="split")
    assert (plan.ask.placed.parts("vision_heads"), plan.ask.placed.parts("vision_ffn")) == (1, 8)
    assert plan.sizes.weights["vision"].per_device < plan.sizes.weights["vision"].whole / 2
    assert any("vision_heads do not divide by 8" in note for note in plan.to_json()["notes"])
    four = kimi_jax.plan("k3", "dp2-tp4", "cpu", context=64, vision="split")
    assert four.ask.placed.parts("vision_heads") == 4


@pytest.mark.parametrize(("draft", "printed"), [("k3-mla", "1.235"), ("k3.1-mla", "1.441"), ("k3.1-gqa", "1.079")])
def test_draft_weights_per_device(draft, printed):
    # Red when the context projection or the Markov tables are cut, or heads and MLPs are not (1.23 GiB is published).
    plan = kimi_jax.plan("k3.1-pro", "tp8", context=64, draft=draft)
    assert f"{plan.sizes.weights['draft'].per_device / 2**30:.3f}" == printed
    whole = kimi_jax.plan("k3.1-pro", "tp8", context=64, draft=draft, draft_place="replicated")
    assert whole.sizes.weights["draft"].per_device == plan.sizes.weights["draft"].whole


def test_draft_context_rows():
    # Red when grouped keys are not cut by head, or the draft's latent rows are wider than the target's.
    grouped = kimi_jax.plan("k3.1-pro", "tp8", draft="k3.1-gqa")
    latent = kimi_jax.plan("k3.1-pro", "tp8", draft="k3.1-mla", kv_dtype="bfloat16")
    assert gigabytes(grouped, "draft_context") == "2.684"  # 21.5 GB over eight
    assert gigabytes(latent, "draft_context") == "6.040"


def test_everything_is_counted_once(pro):
    # Red when a parameter falls out of the tables.
    assert sum(row.arrays for row in pro.sizes.weights.values()) == len(pro.ask.weights)
    whole = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in pro.ask.weights.values())
    assert sum(row.whole for row in pro.sizes.weights.values()) == whole
