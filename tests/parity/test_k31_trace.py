"""Index scores, choices and every traced value of k31-tiny against float64: a fault is found where it is made."""

from typing import Any

import jax
import numpy as np
import pytest

from kimi_jax.layers.mla import Mla
from kimi_jax.ops.indexer import api as index_op
from kimi_jax.ops.mla import api as mla_op
from kimi_jax.ops.mla import sparse as sparse_op
from tests.parity import trace
from tests.parity.k31 import LATENT, golden, logits, parameters, prompt, step_by_step, tiny
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TOLERANCE, assert_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_compilation")]

SCORES = jax.jit(index_op.scores, static_argnames="impl")


def forward(index: int) -> np.ndarray:
    return trace.forward(prompt(index), (), parameters(), tiny(experts="packed").config)[0]


class Seen(trace.Recorder):
    """Also what a layer asks, keeps and chooses."""

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        super().watch(patch)
        select, attend = Mla._select, Mla._attend_selected

        def selecting(layer: Mla, query_latent: Any, weights: Any, positions: Any, cache: Any, pages: Any) -> Any:
            selected = select(layer, query_latent, weights, positions, cache, pages)
            q = layer.indexer.ask(query_latent, layer.q_a_layernorm)
            self.note("index_q", q[0])
            self.note("index_k", cache.index.keys[0])
            self.note("index_w", weights[0])
            self.note("scores", SCORES(q, weights, cache.index, positions)[0])
            self.note("selected", selected[0])
            return selected

        def attending(
            layer: Mla, query: Any, gate: Any, selected: Any, lengths: Any, cache: Any, pages: Any, **come: Any
        ) -> Any:
            expand, sizes = layer.kv_b_proj.weight[...], layer.sizes
            absorbed = mla_op.absorb(query, expand, nope_dim=sizes.nope_dim)
            inner, _ = sparse_op.attend_selected_partial(
                absorbed, cache.latent, selected, latent_dim=sizes.kv_rank, scale=sizes.query_dim**-0.5
            )
            self.note("q_latent", absorbed[0, ..., : sizes.kv_rank])
            self.note("q_shared", absorbed[0, ..., sizes.kv_rank :])
            self.note("rows", cache.latent[0])
            self.note("o_latent", inner[0])
            return attend(layer, query, gate, selected, lengths, cache, pages, **come)

        patch.setattr(Mla, "_select", selecting)
        patch.setattr(Mla, "_attend_selected", attending)


@pytest.fixture(scope="module")
def seen(light_compilation) -> dict[int, dict[str, np.ndarray]]:
    """Values by prompt: of 26 tokens, which is traced, and of 96."""
    found = {}
    for index in (5, 6):
        recorder = Seen()
        with step_by_step() as patch:
            recorder.watch(patch)
            assert_logits(forward(index), logits(index))
        found[index] = recorder.values
    return found


@pytest.mark.parametrize("layer", LATENT)
@pytest.mark.parametrize("index", [5, 6])
def test_scores_and_choices(seen, index, layer):
    # red when a score is off, a tie is decided otherwise, or a layer uses another's choice
    scores, selected = (golden()[f"prompt{index}/layer{layer}/{name}"] for name in ("scores", "selected"))
    found = seen[index][f"trace/layer{layer}/scores"]
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(scores))
    np.testing.assert_allclose(found, scores, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(seen[index][f"trace/layer{layer}/selected"], selected)


def test_every_traced_value(seen):
    # red for the mutations of tests/mutations/indexer.py, first in the layer where they are made
    names = [name for name in golden() if name.startswith("trace/")]
    assert len(names) > 50 and not [name for name in names if name not in seen[5]]
    errors = {name: float(np.abs(seen[5][name] - golden()[name]).max()) for name in names}
    assert not {name: found for name, found in errors.items() if found > TOLERANCE}
