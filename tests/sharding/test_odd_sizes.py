"""Sizes that tell every axis from every other, on device counts that no shipped layout has; then all sizes alike (PF-25, PF-21)."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.placement.layout import Layout, LayoutError
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json
from tests.parity.models import Slots
from tests.parity.quick import ids

COMMON = {"num_hidden_layers": 3, "full_attention": (3,), "attn_res_block_size": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "odd": {
        **COMMON,
        "vocab_size": 528,
        "hidden_size": 50,
        "intermediate_size": 84,
        "kda_heads": 6,
        "kda_head_dim": 10,
        "num_attention_heads": 12,
        "q_lora_rank": 22,
        "kv_lora_rank": 26,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 8,
        "v_head_dim": 18,
        "num_experts": 9,
        "num_experts_per_token": 4,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 96,
        "num_shared_experts": 2,
    },
    "alike": {
        **COMMON,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "kda_heads": 8,
        "kda_head_dim": 8,
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_token": 4,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_shared_experts": 1,
    },
}
ALL = {axis: "t" for axis in ("heads", "ffn", "vocab")}
LAYOUTS = {
    "one": Layout("one", mesh={"t": 1}),
    # 48 of 96 units a device: every share ends inside a scale group
    "two": Layout(
        "two", mesh={"t": 2}, axes={**ALL, "expert_ffn": "t", "latent": "t", "q_lora": "t", "decay_rank": "t"}
    ),
    "three": Layout("three", mesh={"t": 3}, axes={**ALL, "expert": "t", "router_expert": "t"}),
    "six": Layout(
        "six",
        mesh={"a": 2, "b": 3},
        axes={
            **dict.fromkeys(("heads", "vocab"), ("b", "a")),  # the other way round than the mesh
            **dict.fromkeys(("ffn", "expert"), "b"),
            **dict.fromkeys(("expert_ffn", "latent", "decay_rank"), "a"),
        },
    ),
    "eight": Layout(
        "eight",
        mesh={"t": 8},
        axes={**ALL, "expert_ffn": "t", "latent": "t", "router_expert": "t", "q_lora": "t", "decay_rank": "t"},
    ),
}
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("odd")
    return {
        name: write_random_checkpoint(home / name, config_json(**sizes), seed=9, tokenizer=False)
        for name, sizes in MODELS.items()
    }


@cache
def load(folder: Path, layout: str) -> Kimi:
    return kimi_jax.load(folder, LAYOUTS[layout], "float32", max_seq_len=48)


@cache
def run(folder: Path, layout: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Scores of two prompts in calls of 16, and everything their caches hold."""
    rows = Slots(load(folder, layout), 2)
    return rows.run([ids(23, 1), ids(18, 2)], 16), [*rows.of_row(0), *rows.of_row(1)]


@pytest.mark.parametrize(
    "model, layout", [("odd", "two"), ("odd", "three"), ("odd", "six"), ("alike", "eight")], ids=lambda value: value
)
def test_scores_and_states_are_those_of_one_device(checkpoints, model, layout):
    # red when per-shard code uses a whole head count, a per-head parameter stays whole, or two axes of one size are confused
    for got, expected in zip(run(checkpoints[model], layout), run(checkpoints[model], "one"), strict=True):
        for array, reference in zip(got, expected, strict=True):
            np.testing.assert_allclose(array, reference, rtol=0, atol=TOLERANCE * max(1, np.abs(reference).max()))


@pytest.mark.parametrize("model", MODELS)
def test_one_token_at_a_time_is_the_same_function(checkpoints, model):
    # red when prefill and decode disagree on the order of a state's axes (PF-04)
    (whole, _), states = run(checkpoints[model], "one")
    rows = Slots(load(checkpoints[model], "one"), 2)
    (scores, _) = rows.run([ids(23, 1), ids(18, 2)], 1)
    np.testing.assert_allclose(scores, whole, rtol=0, atol=TOLERANCE * np.abs(whole).max())
    for array, reference in zip([*rows.of_row(0), *rows.of_row(1)], states, strict=True):
        np.testing.assert_allclose(array, reference, rtol=0, atol=TOLERANCE * max(1, np.abs(reference).max()))


def test_a_size_that_does_not_divide_is_refused(checkpoints):
    # red when a share is rounded: six heads on four devices
    with pytest.raises(LayoutError, match=r"heads = 6 over t = 4"):
        kimi_jax.load(checkpoints["odd"], Layout("four", mesh={"t": 4}, axes={"heads": "t"}), "float32", max_seq_len=48)
