"""A small model whose cached rows are dealt over the devices, compiled for eight MI355X by the real compiler."""

import pytest

from kimi_jax.config import parse
from kimi_jax.planning.compile import compile_step
from kimi_jax.testing.configs import config_json, with_indexer

PRO = parse(with_indexer(config_json("tiny", num_hidden_layers=3, full_attention=(2,))), "small")
"""A dense KDA layer, a layer of attention over chosen rows with experts, a KDA layer with experts."""


@pytest.mark.slow
def test_a_decode_step_over_chosen_rows(mi355x):
    # Red when a cache is copied to be cut, a kernel spills, parts are joined by more than three exchanges, or the gathers of
    # queries and of candidates, which do not need one another, cannot travel together.
    compiled = compile_step(PRO, "tp8-dcp8", mi355x, "decode", context=8192)
    assert compiled.problems == []
    assert compiled.audit.copies == ()
    assert compiled.audit.memory.aliased == compiled.plan.cache_bytes
    assert all(kernel.spills == 0 for kernel in compiled.kernels)
    exchanged = {kind: count for (part, kind), count in compiled.audit.counted().items() if part == "mla"}
    assert exchanged == {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1}


@pytest.mark.slow
def test_a_prefill_chunk_gathers_rows(mi355x):
    # Red when a long call gathers the queries of all heads, or keeps the gathered rows of a layer longer than that layer.
    compiled = compile_step(PRO, "tp8-dcp8", mi355x, "prefill", context=8192, tokens=512)
    assert compiled.problems == []
    assert compiled.audit.copies == ()
    exchanged = {kind: count for (part, kind), count in compiled.audit.counted().items() if part == "mla"}
    assert exchanged == {"all-gather": 2, "all-reduce": 1}
