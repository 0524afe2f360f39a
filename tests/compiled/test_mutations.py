"""Mistakes in a layer or a step that the compiled report must name; on fake devices, so that each takes seconds."""

from collections import Counter
from dataclasses import replace

import pytest

from kimi_jax.config import parse
from kimi_jax.loop import Steps
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, LayoutError, load_layout
from kimi_jax.planning import step_program
from kimi_jax.planning.compile import Compiled, compile_step
from kimi_jax.testing.configs import config_json

CONFIG = parse(config_json("tiny", num_hidden_layers=2, full_attention=(2,)), "small")


def small() -> Compiled:
    return compile_step(CONFIG, "tp8", "cpu", context=256)


def collectives(found: Compiled) -> Counter[tuple[str, str]]:
    return Counter(found.audit.counted())


@pytest.fixture(scope="module")
def sound() -> Compiled:
    found = small()
    assert found.problems == []
    return found


def test_an_extra_gather_is_named_with_its_layer(monkeypatch, sound):
    # Red when collectives are not counted by the layer that wrote them.
    gather = Parallel.all_gather

    def wrong(self, x, name, axis):
        """Cuts and gathers the query latent, which tp8 keeps whole."""
        return (
            gather(self, self.local_slice(x, "heads", axis), "heads", axis)
            if name == "q_lora"
            else gather(self, x, name, axis)
        )

    monkeypatch.setattr(Parallel, "all_gather", wrong)
    assert collectives(small()) - collectives(sound) == {("mla", "all-gather"): 1}


def test_an_undonated_cache_is_named(monkeypatch):
    # Red when aliased bytes are not held against the cache.
    mapped = Steps._map
    monkeypatch.setattr(
        Steps, "_map", lambda self, body, inputs, outputs, donate: mapped(self, body, inputs, outputs, ())
    )
    (problem,) = small().problems
    assert problem.startswith("0 bytes are updated in place")
    assert "cache[0]" in problem


def test_a_replicated_projection_weighs_more_than_the_plan(monkeypatch):
    # Red when the arguments' bytes are taken from the plan instead of from the compiled program.
    placed, shape = step_program.placed, (CONFIG.mla.heads * CONFIG.mla.query_dim, CONFIG.mla.q_rank)

    def wrong(steps, spec):
        return placed(steps, replace(spec, axes=(None, None)) if spec.shape == shape else spec)

    monkeypatch.setattr(step_program, "placed", wrong)
    assert any(problem.startswith("parameters take") for problem in small().problems)


def test_a_misspelt_axis_is_refused_before_anything_compiles():
    # Red when an unknown axis counts as replicated.
    tp8 = load_layout("tp8")
    with pytest.raises(LayoutError, match='did you mean "heads"'):
        Layout("typo", "", tp8.mesh, {**tp8.axes, "head": ("tensor",)}, tp8.cache)
