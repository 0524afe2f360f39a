"""A trained model comes back from its checkpoint, and computes what was trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import parse
from kimi_jax.model import bind
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.testing.configs import config_json, with_indexer
from kimi_jax.train.forward import forward
from kimi_jax.train.lm import Trainer
from kimi_jax.train.optimiser import Rates
from kimi_jax.train.qat import as_stored
from kimi_jax.train.release import release
from kimi_jax.train.schedule import warmup_stable_decay

SMALL = {
    "vocab_size": 512, "num_hidden_layers": 2, "full_attention": (2,), "attn_res_block_size": 1, "num_experts": 8,
    "num_experts_per_token": 2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 32,
}  # fmt: skip


@pytest.mark.slow
def test_an_exported_model_computes_what_was_trained(tmp_path):
    # red when the forward pass of training runs on unprojected experts or unrounded matrices, attends past the indexer's choice,
    # or an export mixes up w1 and w3
    values = with_indexer(config_json("tiny", **SMALL), index_topk=16)
    config, layout = parse(values), load_layout("single")
    rate = warmup_stable_decay(0.02, 0, 1, 0)
    trainer = Trainer(config, layout, make_mesh(layout), Rates(rate, rate))
    state = trainer.begin(0)
    random = np.random.default_rng(0)
    moved = {name: x + 0.1 * random.standard_normal(x.shape).astype(np.float32) for name, x in state.params.items()}
    state = state._replace(params={name: jnp.asarray(x) for name, x in moved.items()})
    ids = random.integers(0, 500, 29)

    @jax.jit
    def trained(params, biases):
        model = bind(trainer._abstract[0], {**as_stored(params, trainer.stored), **biases})
        return model.logits(forward(model, jnp.asarray(ids[None], jnp.int32), jnp.array([29])).hidden)[0]

    wanted = trained(state.params, state.extra)
    loaded = kimi_jax.load(release(tmp_path / "out", state, config, values), dtype="float32")
    got = loaded.logits(ids.tolist())
    np.testing.assert_allclose(got, wanted, atol=1e-4 * float(np.abs(wanted).max()))
