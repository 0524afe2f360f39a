import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.mla import api, reference
from tests.ops.mla_contract import HEADS, NOPE, AttendContract, PartialContract, ShapesContract, compiled, make


class OnEveryPlatform(AttendContract, ShapesContract):
    @pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
    def test_lowers_for_accelerators(self, platform):
        case = make(0, [300, 20])
        case = case._replace(expand=case.expand.astype(ml_dtypes.bfloat16), cache=case.cache.astype(ml_dtypes.bfloat16))
        self.attend.trace(*map(jnp.asarray, case)).lower(lowering_platforms=(platform,))


class TestReferenceDirect(OnEveryPlatform):
    form = "direct"


class TestReferenceAbsorbed(OnEveryPlatform):
    form = "absorbed"
    bfloat16_runs = False


class TestReferencePartial(PartialContract):
    impl = "reference"


@pytest.mark.parametrize(("tokens", "form"), [(1, "absorbed"), (8, "absorbed"), (63, "absorbed"), (64, "direct")])
def test_auto_chooses_by_the_number_of_queries(monkeypatch, tokens, form):
    seen = []
    monkeypatch.setattr(reference, "attend", lambda *args, absorbed, **kw: seen.append(absorbed))
    api.attend(np.zeros((1, tokens, HEADS, 7)), None, None, None, None, nope_dim=NOPE)
    assert seen == [form == "absorbed"]


def test_memory_does_not_grow_with_the_length_of_the_cache():
    temp = []
    for length in (1024, 8192):
        case = make(0, [300, 20], length=length)
        temp.append(compiled("absorbed").lower(*map(jnp.asarray, case)).compile().memory_analysis().temp_size_in_bytes)
    assert temp[1] < temp[0] + 20_000  # red when the whole cache is widened or masked at once (190 kB a copy)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"mla\.attend has no implementation 'fast'; built: .*reference"):
        api.attend(np.zeros((1, 1, HEADS, 7)), None, None, None, None, nope_dim=NOPE, impl="fast")
