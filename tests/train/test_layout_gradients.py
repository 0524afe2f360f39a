"""Gradients under a layout are those of one device."""

import hashlib
import json
from functools import cache

import jax
import numpy as np
import pytest

from kimi_jax.config import parse
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.train.lm import Trainer
from kimi_jax.train.optimiser import Rates
from kimi_jax.train.packing import Batch
from kimi_jax.train.schedule import warmup_stable_decay
from tests.train.test_nano_config import CONFIG

TOKENS = 48


def values(name: str, shape: tuple[int, ...], start: np.ndarray) -> np.ndarray:
    seed = int.from_bytes(hashlib.md5(name.encode()).digest()[:4], "little")
    return start + 0.05 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@cache
def gradients(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of one batch: kimi-nano cut down to one layer of each kind."""
    given = json.loads(CONFIG.read_text())
    given.pop("vision_config", None)
    text = given["text_config"]
    text["num_hidden_layers"] = 2
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    text["dsa_config"] |= {"dsa_layers": [2], "index_topk": 16}
    layout, rate = load_layout(name), warmup_stable_decay(0.02, 0, 1, 0)
    trainer = Trainer(parse(given), layout, make_mesh(layout), Rates(rate, rate))
    state = trainer.begin(0)
    moved = {key: values(key, array.shape, np.asarray(array)) for key, array in state.params.items()}
    state = trainer.state_of({**moved, **{key: np.asarray(array) for key, array in state.extra.items()}})
    ids = np.random.default_rng(0).integers(0, 1700, (2, TOKENS)).astype(np.int32)
    batch = Batch(ids, np.roll(ids, -1, 1), np.ones(ids.shape, np.float32), np.array([TOKENS, 37], np.int32))
    run = jax.jit(jax.value_and_grad(trainer.evaluate, has_aux=True))
    (loss, _), found = run(state.params, state.extra, batch)
    return float(loss), {key: np.asarray(array) for key, array in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2-tp4", "tp4-ep2"])
def test_gradients_are_those_of_one_device(layout):
    # red when a gradient is not summed over devices that hold the same parameter, or summed once too often
    loss, wanted = gradients("single")
    got_loss, got = gradients(layout)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    still = {name for name, array in wanted.items() if not array.any()}
    # the first mix has one source
    assert still == {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=name)
