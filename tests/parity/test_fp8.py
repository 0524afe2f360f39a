"""A whole model with FP8 weights: what its scales do, with the rounding of activations taken out."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.ops.linear import reference
from kimi_jax.ops.linear.weights import Scaled, widened
from kimi_jax.ops.product import product
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

IDS = list(range(3, 15))
EVERY = "ptpc+latent+router+head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = config_json("tiny", num_hidden_layers=4, full_attention=(2, 4))
    return write_random_checkpoint(tmp_path_factory.mktemp("fp8") / "model", config, tokenizer=False)


@pytest.mark.slow
def test_every_scale_meets_its_channel_under_every_layout(folder, monkeypatch):
    # Red when any layer drops a scale, gives it to another projection, or scales a partial sum by another device's channels.
    # Unrounded activations make an FP8 model the float32 model of its own values; rounding is tested product by product.
    def unrounded(x, weight: Scaled):
        return product(x.astype(jnp.float32), widened(replace(weight, dtype=jnp.float32)))

    monkeypatch.setattr(reference, "_fp8_product", unrounded)
    narrow = kimi_jax.load(folder, dtype="float32", fp8=EVERY)
    plain = kimi_jax.load(folder, dtype="float32")
    params = dict(plain.runner.params)
    held = narrow.runner.params
    treated = [name for name in params if f"{name}_scale" in held and held[name].dtype == jnp.float8_e4m3fn]
    assert len(treated) > 40
    for name in treated:
        params[name] = held[name].astype(jnp.float32) * held[f"{name}_scale"][:, None]
    plain.runner.params = params
    expected = plain.logits(IDS)
    np.testing.assert_allclose(narrow.logits(IDS), expected, rtol=0, atol=1e-4)
    cut = kimi_jax.load(folder, "tp8-lean", "float32", fp8=EVERY)
    np.testing.assert_allclose(cut.logits(IDS), expected, rtol=0, atol=1e-4)
