"""KDA token by token, written down as the text says it, with a switch for each way to get it wrong."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PlainKda:
    """A stand-in for ``ops.kda.api.kda``; without a switch it is right, and must pass the golden checks."""

    read_before_update: bool = False
    decay_after_update: bool = False
    delta_from_undecayed: bool = False
    eps_outside_root: bool = False
    unscaled_query: bool = False
    unnormalised_key: bool = False
    slope_outside_sigmoid: bool = False
    beta_on_key_only: bool = False

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        f: Any,
        b: Any,
        A_log: Any,
        dt_bias: Any,
        state: Any,
        lengths: Any,
        *,
        lower_bound: float,
    ) -> tuple[Any, Any]:
        """See ``ops.kda.api.kda``; every token is real."""
        with jax.default_matmul_precision("highest"):
            return self._run(q, k, v, f, b, A_log, dt_bias, state, lower_bound)

    def _run(self, q: Any, k: Any, v: Any, f: Any, b: Any, A_log: Any, dt_bias: Any, state: Any, bound: float) -> Any:
        slope = jnp.exp(A_log)[:, None]
        logit = f + dt_bias
        g = (
            bound * slope * jax.nn.sigmoid(logit)
            if self.slope_outside_sigmoid
            else bound * jax.nn.sigmoid(slope * logit)
        )
        q = self._unit(q) * (1.0 if self.unscaled_query else q.shape[-1] ** -0.5)
        k = k if self.unnormalised_key else self._unit(k)
        beta = jax.nn.sigmoid(b)
        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, jnp.exp(g)[..., None], beta[..., None]))
        state, out = jax.lax.scan(self._step, state, tokens)
        return jnp.moveaxis(out, 0, 1), state

    def _unit(self, x: Any) -> Any:
        total = jnp.sum(x * x, axis=-1, keepdims=True)
        return x / (jnp.sqrt(total) + 1e-6 if self.eps_outside_root else jnp.sqrt(total + 1e-6))

    def _step(self, state: Any, token: tuple[Any, ...]) -> tuple[Any, Any]:
        q, k, v, decay, beta = token

        def read(state: Any, x: Any) -> Any:
            return jnp.einsum("bnkv,bnk->bnv", state, x)

        old = state if self.decay_after_update else state * decay
        predicted = read(state if self.delta_from_undecayed else old, k)
        delta = beta * v - predicted if self.beta_on_key_only else beta * (v - predicted)
        new = old + k[..., None] * delta[..., None, :]
        new = new * decay if self.decay_after_update else new
        return new, read(old if self.read_before_update else new, q)
