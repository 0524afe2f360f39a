"""How much of each argument a decode step touches: together exactly the bytes of the roofline."""

import pytest

import kimi_jax
from kimi_jax.cache import KdaCache
from kimi_jax.draft.dspark import describe_context
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.planning.expected_bytes import expected_bytes
from kimi_jax.planning.speculation import speculate

LIMIT = 1 << 20


@pytest.mark.parametrize(
    ("model", "layout", "batch", "context"),
    [
        ("k3", "tp8", 1, LIMIT),
        ("k3", "tp8-lean", 8, LIMIT // 8),
        ("k3", "ep8", 3, 999),
        ("k3.1-pro", "tp8", 1, LIMIT),
        ("k3.1-pro", "tp8", 3, 1999),
    ],
)
def test_what_is_touched_is_what_the_roofline_counts(model, layout, batch, context):
    # Red when the share of the experts or of chosen rows, the row that is written or the end of the context is not the roofline's.
    plan = kimi_jax.plan(model, layout, "mi355x", context, batch=batch)
    ask, expected = plan.ask, expected_bytes(plan)

    def read(name: str, spec: ArraySpec) -> float:
        return ask.placed.local_bytes(spec) * expected.touch(name).read

    bytes_ = sum(read(f"params['{name}']", spec) for name, spec in ask.weights.items() if "embed_tokens" not in name)
    for layer, entry in enumerate(ask.cache):
        if isinstance(entry, KdaCache):
            names = (f"cache[{layer}].{field}" for field in KdaCache._fields)
            bytes_ += sum(2 * read(name, spec) for name, spec in zip(names, entry, strict=True))
            assert expected.touch(f"cache[{layer}].state").updated is None
        else:
            specs = {"latent": entry.latent}
            if entry.index:
                specs |= {"index.keys": entry.index.keys, "index.scales": entry.index.scales}
            for field, spec in specs.items():
                name = f"cache[{layer}].{field}"
                bytes_ += read(name, spec) + (expected.touch(name).updated or 0)
    embedding = batch * ask.config.hidden * 2 / 8
    assert bytes_ + embedding == pytest.approx(expected.bytes, rel=1e-9)


@pytest.mark.parametrize("draft", ["k3.1-gqa", "k3.1-mla"])
def test_a_verification_touches_its_rows_and_folds_its_states(draft):
    # Red when a row of the block or of the draft is missing, or states are read once and written without a fold.
    plan = kimi_jax.plan("k3.1-pro", "tp8", "mi355x", LIMIT, draft=draft)
    ask, expected = plan.ask, expected_bytes(plan, 7)
    one, eight = (expected_bytes(plan, drafts).touch for drafts in (0, 7))
    assert eight("cache.target[3].latent").updated == 8 * one("cache[3].latent").updated
    assert eight("cache.target[3].latent").read == pytest.approx(8 * 2048 / LIMIT)
    entry = describe_context(ask.draft, 1, LIMIT, ask.precision)[4][0]
    assert eight("cache.context[4][0]").updated == 8 * ask.placed.local_bytes(entry) / LIMIT
    states = sum(ask.placed.local_bytes(entry.state) for entry in ask.cache if isinstance(entry, KdaCache))
    step = {part.work.part: part.work.bytes for part in speculate(ask, [0.5]).lengths[7].bound.parts}
    assert (step["kda_state"], sum(step.values()) > expected.bytes) == (3 * states, True)
