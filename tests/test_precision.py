from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.precision import PrecisionError, choose_precision, cpu_projection


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float32_is_exact_throughout(platform, dtype):
    precision = choose_precision(dtype, platform=platform)
    assert precision.exact == (dtype == "float32")
    if precision.exact:
        assert {precision.activation, precision.operand, precision.latent} == {np.dtype(np.float32)}


def test_what_a_cpu_widens_keeps_its_values():
    precision = choose_precision("bfloat16", platform="cpu")
    assert precision.activation == jnp.bfloat16  # red when CPU computes in float32: rounding points would be lost
    assert precision.operand == precision.latent == np.float32
    assert choose_precision("bfloat16", "fp8", "cpu").latent == jnp.float8_e4m3fn
    assert (precision.index, choose_precision("bfloat16", platform="rocm").index) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    "described, held", [("flags : fpu amx_bf16 amx_tile", jnp.bfloat16), ("flags : avx512_bf16", np.float32)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cpu_holds_projections_as_it_multiplies_them_fast(monkeypatch, described, held, dtype):
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: described)
    cpu_projection.cache_clear()
    assert choose_precision(dtype, platform="cpu").projection == held  # red: any bfloat16 unit counts as a fast one
    cpu_projection.cache_clear()


def test_a_device_keeps_the_stored_dtypes():
    precision = choose_precision("bfloat16", platform="rocm")
    assert (precision.activation, precision.operand, precision.latent) == (jnp.bfloat16,) * 3
    assert (precision.experts, choose_precision(platform="cpu").experts) == ("packed", "codes")


def test_all_problems_at_once():
    with pytest.raises(PrecisionError) as caught:
        choose_precision("float16", "int8", experts="dense", index_dtype="int4")
    assert len(caught.value.problems) == 4
    assert "choose bfloat16, float32, fp8" in caught.value.problems[1]


def test_the_exact_mode_takes_no_narrow_cache():
    with pytest.raises(PrecisionError, match="the exact mode stores every cache in float32"):
        choose_precision("float32", "bfloat16")
    assert choose_precision("float32", "float32").exact
