"""A model of two layers, KDA with a dense MLP and latent attention with experts, that compiles fast: for tests of the engine."""

import atexit
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.engine.request import Event, Request
from kimi_jax.engine.runner import Runner
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "full_attention": (2,),
    "attn_res_block_size": 1,
    "intermediate_size": 80,
    "kda_heads": 4,
    "kda_head_dim": 16,
    "num_attention_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "routed_expert_hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "max_position_embeddings": 512,
}
CAPACITY = 32


@cache
def folder() -> Path:
    """Its checkpoint: the same bytes every time, no tokenizer."""
    home = Path(tempfile.mkdtemp(prefix="quick-model-"))
    atexit.register(shutil.rmtree, home)
    return write_random_checkpoint(home, config_json(**SIZES), seed=3, tokenizer=False)


@cache
def quick(**options: Any) -> Kimi:
    """The model in float32; equal options share their compiled steps."""
    return kimi_jax.load(folder(), dtype="float32", **{"max_seq_len": CAPACITY, "prefill_chunk": 16, **options})


def ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of random ids."""
    return np.random.default_rng(seed).integers(4, SIZES["vocab_size"], length).tolist()


def answers(runner: Runner, requests: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    """Drawn ids and finish reason of every request."""
    drawn: list[list[int]] = [[] for _ in requests]
    reasons: list[str | None] = [None] * len(requests)
    for event in runner.run(requests):
        assert reasons[event.request] is None, "an event after the last"
        _take(event, drawn[event.request])
        reasons[event.request] = event.finish
    return list(zip(drawn, reasons, strict=True))


def _take(event: Event, drawn: list[int]) -> None:
    if event.token is not None:
        drawn.append(event.token)


def with_block(kimi: Kimi, block: int) -> Runner:
    """A runner with another number of decode steps per block; everything but decoding stays compiled."""
    runner = kimi.runner
    steps = dataclasses.replace(runner.steps, block=block)
    steps.__dict__.update(
        {name: made for name, made in runner.steps.__dict__.items() if "prefill" in name or name == "extend"}
    )
    return Runner(steps, runner.params, runner.allowed, runner.chunk)


def with_parameter(runner: Runner, name: str, change: Any) -> Runner:
    """A runner on the same compiled steps with one parameter changed by ``change(array)``."""
    old = runner.params[name]
    new = jax.device_put(change(np.array(old)), old.sharding)
    return Runner(runner.steps, {**runner.params, name: new}, runner.allowed, runner.chunk)
