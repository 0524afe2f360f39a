"""Steps with FP8 projections, compiled for eight MI355X: codes are what is read, and nothing widens a weight in memory."""

import pytest

from kimi_jax.config import parse
from kimi_jax.planning.compile import compile_step
from kimi_jax.testing.configs import config_json

SIZES = {"hidden_size": 2048, "kda_heads": 64, "num_attention_heads": 64, "intermediate_size": 8192}
CONFIG = parse(config_json("mid", num_hidden_layers=3, full_attention=(2,), num_experts=16, **SIZES), "fp8")
"""A dense KDA layer, an MLA layer with experts, a KDA layer with experts; projections of a device weigh 1 to 4 MB in FP8."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_weights_are_read_by_products_and_kernels_alone(mi355x, phase):
    # Red when XLA converts a weight for a product, a scale is applied to a weight in memory, or the plan counts other bytes.
    compiled = compile_step(CONFIG, "tp8", mi355x, phase, context=1024, tokens=512, fp8="ptpc")
    assert compiled.problems == []
    assert compiled.audit.readers == () and compiled.audit.copies == ()
    large = [a for a in compiled.audit.arguments if a.name.endswith("proj.weight']") and a.bytes > 1 << 20]
    assert len(large) >= 15 and sum("self_attn" in a.name for a in large) >= 10
    assert all(kernel.spills == 0 for kernel in compiled.kernels)
    plain = compile_plan()
    saved = plain.sizes.weight_bytes - compiled.parameter_bytes
    assert saved > 0.9 * sum(a.bytes for a in large)  # a byte for each value of theirs, less the scales


def compile_plan():
    from kimi_jax.planning.plan import plan

    return plan(CONFIG, "tp8", "mi355x", 1024)
