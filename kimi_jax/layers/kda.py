"""Kimi Delta Attention: short convolution, decay gate, delta rule, gated output norm (text-model section 3.1)."""

from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.cache import KdaCache
from kimi_jax.config import KimiConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.param import param
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.kda import api as kda_op
from kimi_jax.ops.kda import fragments, rollback
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import FLOAT32, Precision


class ShortConv(nnx.Module):
    """Weights of one depthwise causal convolution, ``[channels, 1, width]`` float32."""

    def __init__(self, config: KimiConfig) -> None:
        kda = config.kda
        shape = (kda.width, 1, kda.conv_width)
        self.weight = param(shape, FLOAT32, ("heads", None, None), (kda.heads, 1, kda.conv_width))


class HeadNorm(nnx.Module):
    """Norm weight over one head's channels, shared by all heads, float32."""

    def __init__(self, width: int) -> None:
        self.weight = param((width,), FLOAT32, (None,))


class Kda(nnx.Module):
    """One KDA sub-layer; heads are split over the ``heads`` axis and the result is summed over it."""

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        kda, hidden = config.kda, config.hidden
        rows, by_head = (kda.heads, hidden), ("heads", "embed")
        self.q_proj = Linear(kda.width, hidden, by_head, precision, rows)
        self.k_proj = Linear(kda.width, hidden, by_head, precision, rows)
        self.v_proj = Linear(kda.width, hidden, by_head, precision, rows)
        self.g_proj = Linear(kda.width, hidden, by_head, precision, rows)
        self.b_proj = Linear(kda.heads, hidden, by_head, precision)
        self.f_a_proj = Linear(kda.head_dim, hidden, ("decay_rank", "embed"), precision)
        self.f_b_proj = Linear(kda.width, kda.head_dim, ("heads", None), precision, (kda.heads, kda.head_dim))
        self.q_conv1d = ShortConv(config)
        self.k_conv1d = ShortConv(config)
        self.v_conv1d = ShortConv(config)
        self.A_log = param((kda.heads,), FLOAT32, ("heads",))
        self.dt_bias = param((kda.width,), FLOAT32, ("heads",), (kda.heads,))
        self.o_norm = HeadNorm(kda.head_dim)
        self.o_proj = Linear(hidden, kda.width, ("embed", "heads"), precision, (hidden, kda.heads))
        self.head_dim, self.bound, self.eps = kda.head_dim, kda.gate_lower_bound, config.rms_eps
        self.parallel, self.impls = parallel, impls
        refused = kda_op.kernel_problems(kda.gate_lower_bound, kda.head_dim)
        self.impl = "reference" if refused else impls.kda

    def __call__(
        self, x: Float[Array, "rows tokens embed"], lengths: Int[Array, " rows"], cache: KdaCache
    ) -> tuple[Float[Array, "rows tokens embed"], KdaCache]:
        """Runs the tokens of each row after what its cache has seen; tokens at ``lengths`` and beyond change nothing."""
        out, windows, state = kda_op.attend(
            self._project(x),
            self._weights(),
            cache.conv,
            cache.state,
            lengths,
            lower_bound=self.bound,
            eps=self.eps,
            impl=self.impl,
        )
        y = self.parallel.psum(self.o_proj(out, impl=self.impls.linear), "heads")
        return y, KdaCache(windows, state)

    def share(
        self, x: Float[Array, "rows tokens embed"], shares: Int[Array, "parts rows"], cache: KdaCache
    ) -> tuple[Float[Array, "rows tokens embed"], KdaCache]:
        """The same over this device's share of each row's tokens; the cache is that after all shares.

        Args:
          shares: real tokens of each row in the share of every device of the axis ``tokens``.
        """
        out, windows, state = fragments.attend(
            self._project(x),
            self._weights(),
            cache.conv,
            cache.state,
            shares,
            self.parallel,
            lower_bound=self.bound,
            eps=self.eps,
            impl=self.impl,
        )
        y = self.parallel.psum(self.o_proj(out, impl=self.impls.linear), "heads")
        return y, KdaCache(windows, state)

    def verify(
        self, x: Float[Array, "rows tokens embed"], lengths: Int[Array, " rows"], cache: KdaCache
    ) -> tuple[Float[Array, "rows tokens embed"], rollback.Pending]:
        """The same outputs over a drafted block, the cache as it was, and records of the block beside it."""
        out, records = rollback.verify(
            self._project(x),
            self._weights(),
            cache.conv,
            cache.state,
            lengths,
            lower_bound=self.bound,
            eps=self.eps,
            impl=self.impl,
        )
        y = self.parallel.psum(self.o_proj(out, impl=self.impls.linear), "heads")
        return y, rollback.Pending(cache.conv, cache.state, records)

    def _project(self, x: Float[Array, "rows tokens embed"]) -> kda_op.Projected:
        readers = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        weights, dtypes = [reader.factor for reader in readers], [x.dtype] * len(readers)
        q, k, v, gate, latent, b = linear_op.project_many(x, weights, dtypes, self.impls.linear)
        latent = self.parallel.all_gather(latent, "decay_rank", -1)
        return kda_op.Projected(q, k, v, gate, latent, b)

    def _weights(self) -> kda_op.Weights:
        return kda_op.Weights(
            self.q_conv1d.weight[...],
            self.k_conv1d.weight[...],
            self.v_conv1d.weight[...],
            self.f_b_proj.factor,
            self.A_log[...],
            self.dt_bias[...].reshape(-1, self.head_dim),
            self.o_norm.weight[...],
        )
