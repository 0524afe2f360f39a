"""What a model needs is what the planner says of it."""

import kimi_jax
from kimi_jax.config import load_config
from kimi_jax.doctor.need import COMPILER_BYTES, need_of
from kimi_jax.placement.device import load_device
from kimi_jax.placement.layout import load_layout

PUBLISHED = 1_560_860_324_864
"""Bytes of the released weight files, vision included (their index says so)."""


def test_on_gpus_a_parameter_at_a_time_passes_through_the_host():
    need = need_of(load_config("k3"), load_layout("tp8"), load_device("mi355x"), 8192)
    plan = kimi_jax.plan("k3", "tp8", "mi355x", 8192, kv_dtype="bfloat16", vision="replicated")
    # red when the caches of a load are planned in one byte, or its vision tower is left out
    assert need.device_bytes == plan.sizes.device_bytes
    assert need.host == 2 * 896 * 3072 * 1792 + COMPILER_BYTES
    assert need.device_memory == 288 << 30


def test_on_a_cpu_every_device_lives_in_the_host():
    need = need_of(load_config("k3"), load_layout("tp8"), load_device("cpu"), 8192)
    assert need.host == 8 * need.device_bytes > 1.9 * PUBLISHED  # experts are held as codes there, twice their bytes
    assert need.device_memory is None


def test_the_files_are_the_released_ones():
    config = load_config("k3")
    found = [need_of(config, load_layout("tp8"), load_device(name), 8192).files for name in ("cpu", "mi355x")]
    assert found[0] == found[1]  # red when the bytes of a device are taken for those of the files
    unused = 69 * 32 * 4  # the released A_log has 128 entries for 96 heads
    assert found[0] == PUBLISHED - unused


def test_a_context_beyond_the_model_is_the_models():
    config = load_config("k3")
    need = need_of(config, load_layout("tp8"), load_device("mi355x"), 1 << 40)
    assert need.context == config.max_positions
