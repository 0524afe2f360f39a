"""The two launches of a prefill, against the contract of the op."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.test_kda import Case, KdaContract, make, near, oracle
from tests.ops.test_kda import pytest_generate_tests as pytest_generate_tests
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

KEY, VALUE = 16, 32
"""Fewest channels of the kernels, and a different number of value channels (PF-04)."""


class TestChunkKernels(KdaContract):
    """What has no kernel of its own, or is said of XLA alone, is left out."""

    impl = "interpret"
    forms = ("chunked",)

    test_unbounded_gate = test_gradients = test_lowering = None
    test_prefill_then_decode = test_auto_is_one_of_the_forms = None  # steps: test_kda_attend.py
    test_bfloat16_inputs_are_widened_first = None  # products differ: test_split_products

    def run(self, case: Case, form: str) -> tuple[np.ndarray, np.ndarray]:
        """In one of two lengths and with the fewest channels, so that few programs are compiled.

        Padded tokens hold what must not matter; padded channels are zero and change the scale of the queries.
        """
        tokens, key, value = case.q.shape[1], case.q.shape[-1], case.v.shape[-1]
        if key < KEY:
            case = _wider(case, KEY - key, VALUE - value)
        padding = (96 if tokens <= 96 else 512) - tokens
        inputs = (np.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=np.nan) for x in case[:5])
        out, state = super().run(Case(*inputs, *case[5:]), form)
        assert not out[:, tokens:].any()
        scale = np.float32((case.q.shape[-1] / key) ** 0.5)
        return out[:, :tokens, :, :value] * scale, state[..., :key, :value]

    @pytest.mark.parametrize("log_decay", (-0.05, None))
    def test_split_products(self, log_decay):
        case = make(13, tokens=500, rows=1, log_decay=log_decay)
        case = case._replace(**{name: np.asarray(getattr(case, name), jnp.bfloat16) for name in "qkvfb"})
        near(self.run(case, "chunked"), oracle(case), 1e-4)  # red with single bfloat16 products: 5e-3


def _wider(case: Case, key: int, value: int) -> Case:
    def pad(x: np.ndarray, *by: int) -> np.ndarray:
        return np.pad(x, [(0, 0)] * (x.ndim - len(by)) + [(0, count) for count in by])

    q, k, f, dt_bias = (pad(x, key) for x in (case.q, case.k, case.f, case.dt_bias))
    return case._replace(q=q, k=k, f=f, dt_bias=dt_bias, v=pad(case.v, value), state=pad(case.state, key, value))
