"""A step lowered for MI355X: without the plugin, without devices, and red when the program is not what was planned."""

from dataclasses import replace

import pytest

from kimi_jax.config import parse
from kimi_jax.layers.kda import Kda
from kimi_jax.loop import Steps
from kimi_jax.placement import aot
from kimi_jax.placement.device import load_device
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.lowered import read_lowered
from kimi_jax.placement.rocm.problem import TargetError
from kimi_jax.planning import compile as compiling
from kimi_jax.planning import lower, step_program
from kimi_jax.planning.lower import Lowered, lower_step
from kimi_jax.planning.step_program import CompileError
from kimi_jax.testing.configs import config_json

CONFIG = parse(config_json("tiny", num_hidden_layers=3, full_attention=(2,)), "small")
"""A dense KDA layer, an MLA layer with experts, a KDA layer with experts."""


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch):
    """Fetching, loading or asking for the ROCm compiler fails."""

    def refuse(*_args):
        raise AssertionError("the plugin was asked for")

    for module, name in ((aot, "compile_only_devices"), (aot, "plugin_library"), (compiling, "compile_only_devices")):
        monkeypatch.setattr(module, name, refuse)


def calls(found: Lowered) -> dict[str, int]:
    return {kernel.name: times for kernel, times in found.program.kernels.items()}


def test_a_decode_step_agrees_with_its_plan_and_calls_each_kernel_once_a_layer():
    # Red when a layer's kernel is left out, calls are counted by function, or the cache is not donated.
    found = lower_step(CONFIG, context=1024)
    assert found.problems == []
    assert calls(found) == {
        "project": 15, "kda_step": 2, "mix_norm": 6, "mla_enter": 1, "mla_attend": 1,
        "mla_merge_expand": 1, "moe_route_up": 2, "moe_down": 2, "look": 1, "merge": 1,
    }  # fmt: skip
    assert found.donated_bytes == found.cache_bytes == found.plan.cache_bytes
    assert sum(found.program.collectives.values()) == 8
    assert "weaker evidence" in str(found)


def test_a_prefill_chunk_over_more_devices_than_there_are():
    # Red when devices are looked for, or a step with a temperature is expected to draw with kernels.
    tp8 = load_layout("tp8")
    wide = replace(tp8, name="wide", mesh={**tp8.mesh, "data": 2})
    found = lower_step(CONFIG, wide, phase="prefill", context=1024, batch=2, tokens=128, random=True)
    assert found.problems == []
    assert found.plan.ask.placed.devices == 16
    assert {"kda_chunks", "mla_attend_block", "moe_up_tiles"} <= calls(found).keys()


def test_xla_alone_calls_no_kernel():
    # Red when the implementation asked for does not reach the layers.
    found = lower_step(CONFIG, context=256, impl="reference")
    assert (found.problems, calls(found)) == ([], {})


def test_a_kernel_missing_in_one_layer_is_named(monkeypatch):
    # Red when calls are not held against the layers.
    built, made = Kda.__init__, []

    def wrong(self, *args, **kwargs):
        built(self, *args, **kwargs)
        made.append(self)
        self.impl = "reference" if len(made) == 1 else self.impl

    monkeypatch.setattr(Kda, "__init__", wrong)
    assert lower_step(CONFIG, context=256).problems == [
        "kda calls kda_step 1 times in a step; the model has 2 places for it"
    ]


@pytest.mark.parametrize(
    ("options", "name", "places"),
    [({}, "mla_attend", 1), ({}, "merge", 1), ({"phase": "prefill", "tokens": 128}, "moe_sum", 2)],
)
def test_a_kernel_missing_everywhere_is_named(monkeypatch, options, name, places):
    # Red when only kernels that are called somewhere are held against the layers.
    op = {"mla_attend": "mla", "merge": "sample", "moe_sum": "moe"}[name]

    def without(module):
        read = read_lowered(module)
        return replace(read, kernels={kernel: times for kernel, times in read.kernels.items() if kernel.name != name})

    monkeypatch.setattr(lower, "read_lowered", without)
    assert lower_step(CONFIG, context=256, **options).problems == [
        f"{op} calls {name} 0 times in a step; the model has {places} places for it"
    ]


def test_a_replicated_projection_weighs_more_than_the_plan(monkeypatch):
    # Red when the arguments' bytes are taken from the plan instead of from the program.
    placed, shape = step_program.placed, (CONFIG.mla.heads * CONFIG.mla.query_dim, CONFIG.mla.q_rank)

    def wrong(steps, spec):
        return placed(steps, replace(spec, axes=(None, None)) if spec.shape == shape else spec)

    monkeypatch.setattr(step_program, "placed", wrong)
    (problem,) = lower_step(CONFIG, context=256).problems
    assert problem.startswith("parameters take")


def test_an_undonated_cache_is_named(monkeypatch):
    # Red when donations are not held against the caches.
    mapped = Steps._map
    monkeypatch.setattr(
        Steps, "_map", lambda self, body, inputs, outputs, donate: mapped(self, body, inputs, outputs, ())
    )
    (problem,) = lower_step(CONFIG, context=256).problems
    assert problem.startswith("0 bytes are donated")
    assert "cache[0]" in problem


def test_another_rocm_chip_needs_no_compiler_table():
    # Red when the file's [compiler] table is asked for, which only a compile needs.
    assert load_device("mi300x").compiler == ()
    assert lower_step(CONFIG, "tp8", "mi300x", context=256).problems == []


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_another_platform_is_refused(target):
    # Red when kernels for ROCm are reported as evidence for another platform.
    with pytest.raises(TargetError, match="--target cpu without --lower"):
        lower_step(CONFIG, "tp8", target, context=256)


def test_an_unknown_phase_names_the_built_ones():
    # Red when the phase is not checked.
    with pytest.raises(CompileError, match="decode, prefill"):
        lower_step(CONFIG, phase="decod")  # pyright: ignore[reportArgumentType]


def test_interpreted_kernels_are_not_lowered_for_a_gpu():
    # Red when it is accepted: the program would be the interpreter's loops, and say nothing of the kernels.
    with pytest.raises(CompileError, match="on rocm impl 'interpret'; built: reference, pallas"):
        lower_step(CONFIG, impl="interpret")


def test_k3_at_full_size():
    # Red when a layer of the real model runs without its kernel, or its arguments outweigh the plan.
    found = lower_step("k3", context=1 << 20)
    assert found.problems == []
    called = calls(found)
    assert {called[name] for name in ("mla_enter", "mla_attend", "mla_merge_expand")} == {24}
    assert {called[name] for name in ("moe_route_up", "moe_down")} == {92}
    assert (called["kda_step"], called["mix_norm"]) == (69, 2 * 93)
    assert found.donated_bytes == found.plan.cache_bytes
