"""A draft for the small model of two layers: its Markov table knows which id followed which in plain greedy answers.

So it is right for as long as an answer repeats itself, wrong elsewhere, and a batch holds every acceptance from none to all.
"""

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import kimi_jax
from kimi_jax.draft.attach import DraftOptions, attach
from kimi_jax.draft.config_read import read_spec
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.engine.drafted import DraftedRunner
from kimi_jax.engine.request import Request
from kimi_jax.engine.runner import Runner
from kimi_jax.placement.layout import load_layout
from kimi_jax.precision import Precision
from tests.parity.quick import CAPACITY, SIZES, answers, ids, quick
from tests.parity.quick import folder as model_folder

PROMPTS = [ids(length, length) for length in (3, 9, 16, 1)]

CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_size": SIZES["hidden_size"],
    "vocab_size": SIZES["vocab_size"],
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "block_size": 4,
    "target_layer_ids": [0, 1],
    "aux_hidden_stream": "attn_res",
    "mask_token_id": 1,
    "markov_rank": 64,
}


@cache
def plain() -> list[list[int]]:
    """What the target alone says to every prompt until its cache is full."""
    return [got for got, _ in answers(quick().runner, [Request(prompt, max_tokens=CAPACITY) for prompt in PROMPTS])]


def table(first: np.ndarray, said: list[list[int]]) -> np.ndarray:
    """The second Markov table of a draft that knows which id followed which in some answers."""
    second = np.zeros_like(first)
    for answer in said:
        for before, after in dict(pairwise(answer)).items():
            second[after] += 100 * first[before]
    return second


def folder() -> Path:
    """The draft's checkpoint."""
    return checkpoint(decent=True)


@cache
def checkpoint(*, decent: bool) -> Path:
    """The draft, or one like it that knows nothing, which asks the target nothing."""
    home = Path(tempfile.mkdtemp(prefix="quick-draft-"))
    atexit.register(shutil.rmtree, home)
    random = np.random.default_rng(8)
    specs = draft_parameters(read_spec(CONFIG, "here").sizes, Precision())
    tensors = {name: random.normal(size=spec.shape).astype(np.float32) / 8 for name, spec in specs.items()}
    second = table(tensors["markov_head.markov_w1.weight"], plain() if decent else [])
    save_file({**tensors, "markov_head.markov_w2.weight": second}, home / "model.safetensors")
    (home / "config.json").write_text(json.dumps(CONFIG))
    return home


@cache
def target(devices: int = 1) -> Runner:
    """The target, its heads and MLPs cut over some devices."""
    if devices == 1:
        return quick().runner
    whole = load_layout("tp8")
    cut = replace(whole, name=f"tp{devices}", mesh={**whole.mesh, "tensor": devices})
    sizes = {"dtype": "float32", "max_seq_len": CAPACITY, "prefill_chunk": 16}
    return kimi_jax.load(model_folder(), layout=cut, **sizes).runner


@cache
def runner(devices: int = 1, *, decent: bool = True) -> DraftedRunner:
    """The target with this draft."""
    alone = target(devices)
    joined, params = attach(alone.steps, alone.params, DraftOptions(checkpoint(decent=decent)))
    return DraftedRunner(joined, params, alone.allowed, alone.chunk)
