"""The same report from the compiler of this machine, on eight fake devices: no wheel needed."""

import pytest

from kimi_jax.config import parse
from kimi_jax.planning.compile import compile_step
from kimi_jax.planning.step_program import CompileError
from kimi_jax.testing.configs import config_json

CONFIG = parse(config_json("tiny", num_hidden_layers=3, full_attention=(2,)), "small")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_arguments_weigh_what_the_plan_says(phase):
    # Red when loop.Steps._map forgets to donate the cache, or when the chunk's ids count as a cache.
    found = compile_step(CONFIG, "tp8", "cpu", phase, context=256, tokens=32)
    assert found.problems == []
    assert found.audit.launches is None
    assert found.kernels == ()
    assert found.to_json()["plan"]["agrees"]
    assert "every cache is updated in place" in str(found)


def test_an_unknown_phase_names_the_built_ones():
    # Red when the phase is not checked.
    with pytest.raises(CompileError, match="decode, prefill"):
        compile_step(CONFIG, "tp8", "cpu", "decod")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("impl", ["pallas", "interpret"])
def test_kernels_are_not_compiled_for_a_cpu(impl):
    # Red when the failure is left to the kernels, which name neither the argument nor what works.
    with pytest.raises(CompileError, match=f"on cpu impl '{impl}'; built: reference"):
        compile_step(CONFIG, "tp8", "cpu", context=256, impl=impl)
