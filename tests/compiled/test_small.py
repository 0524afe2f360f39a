"""A small model's steps, compiled for eight MI355X by the real compiler."""

import pytest

from kimi_jax.config import parse
from kimi_jax.placement.aot import compile_only_devices
from kimi_jax.placement.compiler import platform_of
from kimi_jax.planning.compile import compile_step
from kimi_jax.testing.configs import config_json

CONFIG = parse(config_json("tiny", num_hidden_layers=3, full_attention=(2,)), "small")
"""A dense KDA layer, an MLA layer with experts, a KDA layer with experts."""


@pytest.fixture(scope="module")
def decode(mi355x):
    return compile_step(CONFIG, "tp8", mi355x, "decode", context=1024)


def test_arguments_weigh_what_the_plan_says_and_caches_are_updated_in_place(decode):
    # Red when loop.Steps._map forgets to donate the cache, or plan counts a parameter twice.
    assert decode.problems == []
    assert decode.audit.memory.aliased == decode.plan.cache_bytes


def test_a_compile_only_device_is_taken_for_a_real_one(mi355x):
    # Red when a report is made with other options and kernels than a running step.
    assert platform_of(compile_only_devices(mi355x, 8)[0]) == mi355x.platform


def test_two_collectives_a_layer_and_one_each_for_embedding_and_draw(decode):
    # Red when a layer gathers or reduces once more.
    assert decode.audit.counted() == {
        ("embedding", "all-reduce"): 1,
        ("kda", "all-reduce"): 2,
        ("mla", "all-reduce"): 1,
        ("dense", "all-reduce"): 1,
        ("moe", "all-reduce"): 2,
        ("draw", "all-gather"): 1,
    }
    assert {collective.participants for collective in decode.audit.collectives} == {8}


def test_every_kernel_is_read_and_built_for_the_chip(decode):
    # Red when the code objects are not kept, or another chip is described to the compiler.
    assert len(decode.kernels) > 20
    assert all("gfx950" in kernel.target for kernel in decode.kernels)
    assert all(0 < kernel.vgprs <= 512 for kernel in decode.kernels)


def test_launches_are_counted_by_loop_and_part(decode):
    # Red when the launch sequence is not kept, or an inner loop counts as the loop over steps.
    launches = decode.audit.launches
    assert launches is not None
    assert 0 < launches.outside < launches.step
    assert launches.inner == 0  # no loop is left inside a step: a kernel walks over the experts
    assert {"kda", "mla", "moe", "attn_res"} <= dict(launches.parts).keys()


def test_each_kernel_is_reported_as_a_step_starts_it(decode):
    # Red when the launch sequence's names are not those of the code objects, or a kernel is counted by its code.
    each = {kernel["name"]: kernel for kernel in decode.to_json()["kernels"]["each"]}
    assert (each["kda_step"]["launches"], each["mla_attend"]["launches"], each["moe_down"]["launches"]) == (2, 1, 2)
    assert each["kda_step"]["shared"] > 0
    assert each["kda_step"]["grid"] == [1, 1, 1]  # one row, one head of eight on a device
    assert sum(kernel["launches"] for kernel in each.values()) == dict(decode.audit.launches.kinds)["kCustomKernel"]
    assert all(kernel["spills"] == 0 for kernel in each.values())


def test_every_argument_is_read_once_and_as_far_as_the_roofline_says(decode):
    # Red when a kernel takes a weight that another has read, or the roofline forgets what a kernel reads.
    moved = decode.audit.moved
    halves = "params['model.layers.1.self_attn.kv_b_proj.weight']"  # its keys go before attention, its values after
    assert [again.argument for again in moved.again] == [halves]
    assert moved.arguments == pytest.approx(moved.least + moved.again[0].bytes, rel=0.01)


def test_nothing_large_is_copied(decode):
    # Red when a cache is stacked over layers.
    assert decode.audit.copies == ()
