"""Faults of the feed-forward parts: router, latent experts, SiTU, stored MXFP4 bytes (text-model sections 2.2, 4, 8.1, 10)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.layers import latent_moe
from kimi_jax.layers.latent_moe import LatentMoe
from kimi_jax.layers.mlp import GatedMlp
from kimi_jax.ops.linear import api as linear_op
from kimi_jax.ops.situ import api as situ_op
from tests.mutations.plant import Plant, Site


def weights_from_the_biased_score(site: Site) -> None:
    def route(op: Any, logits: Any, bias: Any, *rest: Any, **kw: Any) -> Any:
        ids, _ = op(logits, bias, *rest, **kw)
        weights = jnp.take_along_axis(jax.nn.sigmoid(logits) + bias, ids, axis=-1)
        return ids, weights / weights.sum(axis=-1, keepdims=True)

    site.wrap("route", route)


def bias_unused(site: Site) -> None:
    site.wrap("route", lambda op, logits, bias, *rest, **kw: op(logits, jnp.zeros_like(bias), *rest, **kw))


def bias_added_to_the_logit(site: Site) -> None:
    site.wrap("route", lambda op, logits, bias, *rest, **kw: op(logits + bias, jnp.zeros_like(bias), *rest, **kw))


def one_expert_too_few(site: Site) -> None:
    site.sizes = dataclasses.replace(
        site.sizes, moe=dataclasses.replace(site.sizes.moe, top_k=site.sizes.moe.top_k - 1)
    )


def softmax_router(site: Site) -> None:
    def route(op: Any, logits: Any, bias: Any, *rest: Any, **kw: Any) -> Any:
        ids, _ = op(logits, bias, *rest, **kw)
        return ids, jax.nn.softmax(jnp.take_along_axis(logits, ids, axis=-1), axis=-1)

    site.wrap("route", route)


def equal_weights(site: Site) -> None:
    def route(op: Any, *args: Any, **kw: Any) -> Any:
        ids, weights = op(*args, **kw)
        return ids, jnp.ones_like(weights) / weights.shape[-1]

    site.wrap("route", route)


def weights_in_another_order(site: Site) -> None:
    def route(op: Any, *args: Any, **kw: Any) -> Any:
        ids, weights = op(*args, **kw)
        return ids, weights[:, ::-1]

    site.wrap("route", route)


def router_in_half_precision(site: Site) -> None:
    def route(op: Any, logits: Any, *rest: Any, **kw: Any) -> Any:
        return op(logits.astype(jnp.bfloat16).astype(jnp.float32), *rest, **kw)

    site.wrap("route", route)


def router_on_the_latent(site: Site) -> None:
    """Through the up projection, since the latent is too narrow for the router."""

    def make(call: Any) -> Any:
        def run(layer: LatentMoe, x: Any, real: Any, **cut: Any) -> Any:
            router, shipped = layer.gate.weight[...], linear_op.project_many
            seen = layer.routed_expert_up_proj(layer.routed_expert_down_proj(x.reshape(-1, x.shape[-1])))

            def project(flat: Any, readers: Any, *rest: Any) -> Any:
                return [*shipped(seen, [router], [jnp.float32]), *shipped(flat, readers, *rest)[1:]]

            with site.patch.context() as patch:
                op = SimpleNamespace(**{**vars(linear_op), "project_many": project})
                patch.setattr(latent_moe, "linear_op", op)
                return call(layer, x, real, **cut)

        return run

    site.replace(LatentMoe, "__call__", make)


def experts_off_by_one(site: Site) -> None:
    count = site.sizes.moe.experts
    site.wrap("experts", lambda op, z, ids, *rest, **kw: op(z, (ids + 1) % count, *rest, **kw))


def norm_before_weighting(site: Site) -> None:
    """Every expert's output is normalised on its own, and the sum is not."""

    def run(op: Any, z: Any, ids: Any, weights: Any, w: Any, **kw: Any) -> Any:
        ones = jnp.ones_like(weights[:, :1])
        outs = [op(z, ids[:, i : i + 1], ones, w, **kw) for i in range(ids.shape[1])]
        return sum(weights[:, i : i + 1] * _unit(out) for i, out in enumerate(outs))

    _join(
        site,
        lambda layer, routed, shared: (
            layer.routed_expert_up_proj(routed * layer.routed_expert_norm.weight[...]) + shared
        ),
    )
    site.wrap("experts", run)


def norm_before_the_reduction(site: Site) -> None:
    """As if two devices held the even and the odd experts, and each normalised its own part."""
    parts: list[Any] = []

    def run(op: Any, z: Any, ids: Any, weights: Any, w: Any, **kw: Any) -> Any:
        nobody = site.sizes.moe.experts
        parts[:] = [op(z, jnp.where(ids % 2 == half, ids, nobody), weights, w, **kw) for half in (0, 1)]
        return parts[0] + parts[1]

    def join(layer: LatentMoe, routed: Any, shared: Any) -> Any:
        return sum(layer.routed_expert_up_proj(layer.routed_expert_norm(part)) for part in parts) + shared

    _join(site, join)
    site.wrap("experts", run)


def norm_after_the_up_projection(site: Site) -> None:
    def join(layer: LatentMoe, routed: Any, shared: Any) -> Any:
        return _unit(layer.routed_expert_up_proj(routed * layer.routed_expert_norm.weight[...])) + shared

    _join(site, join)


def no_norm(site: Site) -> None:
    _join(site, lambda layer, routed, shared: layer.routed_expert_up_proj(routed) + shared)


def shared_experts_in_the_norm(site: Site) -> None:
    def join(layer: LatentMoe, routed: Any, shared: Any) -> Any:
        return _unit(layer.routed_expert_up_proj(layer.routed_expert_norm(routed)) + shared)

    _join(site, join)


def no_shared_experts(site: Site) -> None:
    _join(site, lambda layer, routed, shared: layer.routed_expert_up_proj(layer.routed_expert_norm(routed)))


def right_join(site: Site) -> None:
    _join(site, lambda layer, routed, shared: layer.routed_expert_up_proj(layer.routed_expert_norm(routed)) + shared)


def _join(site: Site, join: Any) -> None:
    def run(layer: LatentMoe, routed: Any, inner: Any, _: Any) -> Any:
        return join(layer, routed, layer.shared_experts.down_proj(inner))

    site.patch.setattr(LatentMoe, "_join", run)


def _unit(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _activation(site: Site, situ: Any) -> None:
    site.patch.setattr(situ_op, "situ", situ)
    site.recompile("experts")


def right_situ(site: Site) -> None:
    _activation(
        site, lambda a, b, beta, linear: beta * jnp.tanh(a / beta) * jax.nn.sigmoid(a) * linear * jnp.tanh(b / linear)
    )


def silu_instead_of_situ(site: Site) -> None:
    _activation(site, lambda a, b, *_: jax.nn.silu(a) * b)


def linear_half_unbounded(site: Site) -> None:
    site.sizes = dataclasses.replace(site.sizes, situ_linear_beta=None)


def gated_half_unbounded(site: Site) -> None:
    _activation(site, lambda a, b, beta, linear: jax.nn.silu(a) * linear * jnp.tanh(b / linear))


def sigmoid_of_the_squashed_gate(site: Site) -> None:
    def situ(a: Any, b: Any, beta: float, linear: float) -> Any:
        squashed = beta * jnp.tanh(a / beta)
        return squashed * jax.nn.sigmoid(squashed) * linear * jnp.tanh(b / linear)

    _activation(site, situ)


def bounds_swapped(site: Site) -> None:
    site.sizes = dataclasses.replace(site.sizes, situ_beta=25.0, situ_linear_beta=4.0)


def dense_layer_without_situ(site: Site) -> None:
    """Only the dense layer, whose trap is saturation."""

    def make(call: Any) -> Any:
        def run(layer: GatedMlp, x: Any, impl: Any) -> Any:
            if layer.gate_proj.weight.shape[0] != site.sizes.dense_width:
                return call(layer, x, impl)
            return layer.down_proj(jax.nn.silu(layer.gate_proj(x)) * layer.up_proj(x))

        return run

    site.replace(GatedMlp, "__call__", make)


def w1_and_w3_swapped(site: Site) -> None:
    site.swap("w1.weight_packed", "w3.weight_packed")
    site.swap("w1.weight_scale", "w3.weight_scale")


def scales_of_w1_and_w3_swapped(site: Site) -> None:
    site.swap("w1.weight_scale", "w3.weight_scale")


def gate_and_up_swapped(site: Site) -> None:
    site.swap("gate_proj.weight", "up_proj.weight")


def nibbles_swapped(site: Site) -> None:
    site.change("weight_packed", lambda x: x >> 4 | x << 4)


def sign_bit_ignored(site: Site) -> None:
    site.change("weight_packed", lambda x: x & 0x77)


def halves_side_by_side(site: Site) -> None:
    """Low nibbles as the first half of a row, high nibbles as the second."""

    def change(x: np.ndarray) -> np.ndarray:
        codes = np.concatenate([x & 15, x >> 4], axis=-1)
        return codes[..., 0::2] | codes[..., 1::2] << 4

    site.change("weight_packed", change)


def scale_bias_126(site: Site) -> None:
    site.change("weight_scale", lambda x: x + np.uint8(1))


def scale_bias_forgotten(site: Site) -> None:
    site.change("weight_scale", lambda x: np.minimum(x.astype(int) + 127, 254).astype(np.uint8))


def scales_of_the_next_row(site: Site) -> None:
    site.change("weight_scale", lambda x: np.roll(x, 1, axis=-2))


def scales_of_the_next_group(site: Site) -> None:
    """Only w2 has rows of more than one group here."""
    site.change("w2.weight_scale", lambda x: np.roll(x, 1, axis=-1))


def experts_stacked_backwards(site: Site) -> None:
    site.change("w2.weight_packed", lambda x: x[::-1])


RIGHT = {"join written down": right_join, "situ written down": right_situ}

FAULTS: dict[str, Plant] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        weights_from_the_biased_score,
        bias_unused,
        bias_added_to_the_logit,
        one_expert_too_few,
        softmax_router,
        equal_weights,
        weights_in_another_order,
        router_in_half_precision,
        router_on_the_latent,
        experts_off_by_one,
        norm_before_weighting,
        norm_before_the_reduction,
        norm_after_the_up_projection,
        no_norm,
        shared_experts_in_the_norm,
        no_shared_experts,
        silu_instead_of_situ,
        linear_half_unbounded,
        gated_half_unbounded,
        sigmoid_of_the_squashed_gate,
        bounds_swapped,
        dense_layer_without_situ,
        w1_and_w3_swapped,
        scales_of_w1_and_w3_swapped,
        gate_and_up_swapped,
        nibbles_swapped,
        sign_bit_ignored,
        halves_side_by_side,
        scale_bias_126,
        scale_bias_forgotten,
        scales_of_the_next_row,
        scales_of_the_next_group,
        experts_stacked_backwards,
    )
}
