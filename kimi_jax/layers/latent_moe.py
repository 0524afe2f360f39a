"""Stable LatentMoE: routed experts in a latent space plus shared experts on the hidden vector (text-model section 4)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from kimi_jax.config import KimiConfig, MoeConfig
from kimi_jax.layers.linear import Linear
from kimi_jax.layers.mlp import GatedMlp
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import param
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.moe import api as moe_op
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import FLOAT32, ExpertForm, Precision

BYTE, CODE = np.dtype(np.uint8), np.dtype(np.int8)
GROUP = 32
"""Values that share one MXFP4 scale."""


class ExpertMatrix(nnx.Module):
    """One matrix of every expert, stacked: E2M1 codes and the scale bytes of their groups.

    Codes are the checkpoint's, two a byte with the low nibble first, or one int8 a value; in training there are float32 masters
    instead (see ``Precision.experts``).
    """

    def __init__(self, experts: int, out: int, inner: int, axes: tuple[str, str], form: ExpertForm) -> None:
        logical = (experts, out, inner)
        if form == "masters":
            self.weight = param(logical, FLOAT32, ("expert", *axes))
            return
        if form == "packed":
            self.weight_packed = param((experts, out, inner // 2), BYTE, ("expert", *axes), logical)
        else:
            self.weight_codes = param(logical, CODE, ("expert", *axes))
        self.weight_scale = param((experts, out, inner // GROUP), BYTE, ("expert", *axes), logical)


class Experts(nnx.Module):
    """The three matrices of the routed experts: w1 gate, w3 up, w2 down."""

    def __init__(self, moe: MoeConfig, form: ExpertForm) -> None:
        up = ("expert_ffn", "expert_latent")
        self.w1 = ExpertMatrix(moe.experts, moe.width, moe.latent, up, form)
        self.w3 = ExpertMatrix(moe.experts, moe.width, moe.latent, up, form)
        self.w2 = ExpertMatrix(moe.experts, moe.latent, moe.width, ("expert_latent", "expert_ffn"), form)
        self.form = form

    def arrays(self) -> moe_op.ExpertWeights | moe_op.ExpertCodes | moe_op.ExpertMasters:
        """What the op reads."""
        matrices = (self.w1, self.w3, self.w2)
        if self.form == "masters":
            return moe_op.ExpertMasters(*(m.weight[...] for m in matrices))
        if self.form == "packed":
            return moe_op.ExpertWeights(*(a[...] for m in matrices for a in (m.weight_packed, m.weight_scale)))
        return moe_op.ExpertCodes(*(a[...] for m in matrices for a in (m.weight_codes, m.weight_scale)))


class Router(Linear):
    """Router weight and the bias that only selects; the bias stays float32."""

    def __init__(self, config: KimiConfig, precision: Precision) -> None:
        super().__init__(config.moe.experts, config.hidden, ("router_expert", "embed"), precision)
        self.e_score_correction_bias = param((config.moe.experts,), FLOAT32, (None,))


class LatentMoe(nnx.Module):
    """One mixture-of-experts sub-layer.

    The routed sum is whole before its norm: it and the shared experts' partial result are reduced in one collective. Where a
    layout cuts the latent, the up projection's partial joins the shared one instead.
    """

    def __init__(self, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations) -> None:
        moe, hidden = config.moe, config.hidden
        self.gate = Router(config, precision)
        self.routed_expert_down_proj = Linear(moe.latent, hidden, ("latent", "embed"), precision)
        self.experts = Experts(moe, precision.experts)
        self.routed_expert_norm = RmsNorm(moe.latent, config.rms_eps, precision)
        self.routed_expert_up_proj = Linear(hidden, moe.latent, ("embed", "latent"), precision)
        self.shared_experts = GatedMlp(hidden, moe.shared_width, config.situ_beta, config.situ_linear_beta, precision)
        self.sizes, self.betas = moe, (config.situ_beta, config.situ_linear_beta)
        self.parallel, self.impls = parallel, impls

    def __call__(
        self, x: Float[Array, "rows tokens embed"], real: Bool[Array, "rows tokens"], *, cut: bool = False
    ) -> Float[Array, "rows tokens embed"]:
        """Runs every token through its experts and the shared ones.

        Args:
          real: False for padding, which touches no expert.
          cut: whether ``x`` is this device's share of the call (``layers/share``). Devices that share tokens and experts
            then bring their tokens together for the routed experts, and each ends with the sums of its own.
        """
        parallel, moe = self.parallel, self.sizes
        asked, inner = self._ask(x.reshape(-1, x.shape[-1]))
        bias, real = self.gate.e_score_correction_bias[...], real.reshape(-1)
        experts = self.experts.arrays()
        first = parallel.index("expert") * experts[0].shape[0]
        meet, summed = cut and parallel.common("expert", "tokens") > 1, ("expert", "expert_ffn")
        beta, linear_beta = self.betas
        if not meet and moe_op.routes_itself(real.size, self.impls.moe):
            routed = moe_op.routed_experts(
                asked,
                bias,
                real,
                experts,
                top_k=moe.top_k,
                renormalize=moe.renormalize,
                scale=moe.scale,
                beta=beta,
                linear_beta=linear_beta,
                first_expert=first,
                dtype=x.dtype,
                impl=self.impls.moe,
            )
            return self._join(routed, inner, summed).reshape(x.shape)
        logits, latent = asked.whole()
        ids, weights = moe_op.route(
            logits,
            bias,
            moe.top_k,
            renormalize=moe.renormalize,
            scale=moe.scale,
            real=real,
            impl=self.impls.moe,
        )
        if meet:
            latent = parallel.gather_among(latent, "expert", "tokens", 0)
            sent = jnp.stack([ids, lax.bitcast_convert_type(weights, ids.dtype)])  # as one collective
            ids, bits = parallel.gather_among(sent, "expert", "tokens", 1)
            weights = lax.bitcast_convert_type(bits, weights.dtype)
        routed = moe_op.experts(
            latent,
            ids,
            weights,
            experts,
            beta=beta,
            linear_beta=linear_beta,
            first_expert=first,
            dtype=x.dtype,
            impl=self.impls.moe,
        )
        if meet:
            routed = parallel.scatter_among(routed.astype(inner.dtype), "expert", "tokens", 0)
            summed = ("expert_ffn",)
        return self._join(routed, inner, summed).reshape(x.shape)

    def _ask(self, x: Float[Array, "tokens embed"]) -> tuple[moe_op.Asked | moe_op.Sent, Float[Array, "tokens ffn"]]:
        """What goes to the router and the experts, whole on every device, and the first half of the shared experts."""
        parallel, impl = self.parallel, self.impls.linear
        router, latent, shared = self.gate.factor, self.routed_expert_down_proj.factor, self.shared_experts.first
        over = parallel.mesh_axes("latent")
        alike = over and over == parallel.mesh_axes("router_expert") and x.dtype == jnp.bfloat16
        if alike and impl != "reference" and moe_op.routes_itself(len(x), self.impls.moe):
            words, (inner,) = linear_op.project_words(x, router, latent, shared, impl=impl)
            return moe_op.Sent(parallel.stacked(words, "latent"), router.shape[0], latent.shape[0]), inner
        outs = linear_op.project_many(x, [router, latent, shared], [jnp.float32, x.dtype, x.dtype], impl)
        parts = parallel.all_gather_together([(outs[0], "router_expert"), (outs[1], "latent")])
        return moe_op.Asked(*parts), outs[2]

    def _join(
        self, routed: Float[Array, "tokens latent"], inner: Float[Array, "tokens ffn"], summed: tuple[str, ...]
    ) -> Float[Array, "tokens embed"]:
        """Ends both parts: the routed sum, and the shared experts' products between their two halves.

        Args:
          summed: named axes over which the routed part is still to be summed.
        """
        parallel, impl = self.parallel, self.impls.linear
        norm, up, down = self.routed_expert_norm, self.routed_expert_up_proj, self.shared_experts.down_proj
        over, shared_over = (set(parallel.mesh_axes(*names)) for names in (summed, ("ffn",)))
        if parallel.size("latent") == 1 and over == shared_over:
            joined = parallel.psum(linear_op.project_beside(routed, inner, down.factor, impl), "ffn")
            return linear_op.project_and_add(joined, norm.weight[...], norm.eps, up.factor, impl)
        if parallel.size("latent") > 1 and set(parallel.mesh_axes("latent")) == shared_over:
            whole, first = parallel.psum(routed, *summed), parallel.index("latent") * up.factor.shape[1]
            pair = linear_op.project_pair(whole, norm.weight[...], norm.eps, first, up.factor, inner, down.factor, impl)
            return parallel.psum(pair, "ffn")
        shared = down(inner, impl=impl)
        if parallel.size("latent") == 1:
            routed, shared = parallel.psum_each([(routed, summed), (shared, ("ffn",))])
            return linear_op.project_normed(routed, norm.weight[...], norm.eps, up.factor, impl) + shared
        whole = self.routed_expert_norm(parallel.psum(routed, *summed))
        partial = self.routed_expert_up_proj(parallel.local_slice(whole, "latent", -1), impl=self.impls.linear)
        return parallel.psum(partial, "latent") + parallel.psum(shared, "ffn")
