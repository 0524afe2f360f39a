"""Faults of the Attention Residuals, the norms around them, and the two ends of the model (text-model sections 2.1, 2.3, 5, 10)."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import model as whole_model
from kimi_jax.layers.decoder import DecoderLayer, Residuals
from kimi_jax.ops import norm as norm_op
from kimi_jax.ops.attn_res import api as attn_res
from tests.mutations.plant import Plant, Site


def mix(residuals: Residuals, norm: Any, row: Any) -> Any:
    """The mix of one site, before its norm."""
    blocks, prefix, update = residuals
    return attn_res.mix(
        blocks, prefix if update is None else prefix + update, norm.weight[...] * row.weight[0], norm.eps
    )


@dataclass(frozen=True)
class PlainLayer:
    """A stand-in for ``DecoderLayer.__call__`` with a switch for each way to get it wrong; without one it is right."""

    residual_around_attention: bool = False
    residual_around_mlp: bool = False
    residual_stream_only: bool = False
    embedding_in_first_sum: bool = False
    sum_never_restarts: bool = False
    block_appended_before_mix: bool = False
    block_never_appended: bool = False
    block_appended_after_layer: bool = False
    mlp_mix_without_prefix: bool = False
    mlp_mix_before_attention_is_added: bool = False
    mlp_reads_the_attention_mix: bool = False
    attention_reads_the_prefix: bool = False
    mlp_restarts_the_sum: bool = False

    def __call__(self, layer: DecoderLayer, residuals: Residuals, tokens: Any, cache: Any) -> tuple[Residuals, Any]:
        blocks, prefix, _ = residuals
        first = not blocks
        start = layer.starts_block
        sources = residuals
        if start and self.block_appended_before_mix:
            sources = Residuals((*blocks, prefix), prefix)
        mixed = first or self.attention_reads_the_prefix or self.residual_stream_only
        x = prefix if mixed else mix(sources, layer.self_attention_res_norm, layer.self_attention_res_proj)
        y, cache = layer._attend(layer.input_layernorm(x), tokens, cache)
        y = y + x if self.residual_around_attention else y
        old, finished = prefix, (*blocks, prefix)
        restart = start and not self.sum_never_restarts and not (first and self.embedding_in_first_sum)
        prefix = prefix + y if self.residual_stream_only or not restart else y
        late = self.block_appended_after_layer or (self.block_never_appended and not first)
        blocks = finished if start and not late else blocks
        x = self._before_mlp(layer, x, blocks, prefix, old)
        y = layer._feed_forward(layer.post_attention_layernorm(x), tokens)
        y = y + x if self.residual_around_mlp else y
        prefix = y if self.mlp_restarts_the_sum and start else prefix + y
        return Residuals(finished if start and self.block_appended_after_layer else blocks, prefix), cache

    def _before_mlp(self, layer: DecoderLayer, x: Any, blocks: Any, prefix: Any, old: Any) -> Any:
        if self.residual_stream_only:
            return prefix
        if self.mlp_reads_the_attention_mix:
            return x
        if self.mlp_mix_before_attention_is_added:
            prefix = old
        sources = Residuals(blocks[:-1], blocks[-1]) if self.mlp_mix_without_prefix else Residuals(blocks, prefix)
        return mix(sources, layer.mlp_res_norm, layer.mlp_res_proj)


def plain(**switches: bool) -> Plant:
    def plant(site: Site) -> None:
        run = PlainLayer(**switches)
        site.patch.setattr(DecoderLayer, "__call__", lambda *args: run(*args))

    return plant


def _mixed(site: Site, weigh: Any, values: Any = lambda source, eps: source) -> None:
    """Replaces the mix: weights ``weigh(sources, query, eps)`` [sources, ...], values per source."""

    def run(_: Any, blocks: Any, prefix: Any, query: Any, eps: float) -> Any:
        sources = jnp.stack([*blocks, prefix])
        return jnp.sum(weigh(sources, query, eps)[..., None] * values(sources, eps), axis=0)

    site.wrap("mix", run)


def _normalised(sources: Any, eps: float) -> Any:
    return sources * jax.lax.rsqrt(jnp.mean(sources**2, axis=-1, keepdims=True) + eps)


def _weights(sources: Any, query: Any, eps: float) -> Any:
    return jax.nn.softmax(jnp.sum(_normalised(sources, eps) * query, axis=-1), axis=0)


def right_mix(site: Site) -> None:
    _mixed(site, _weights)


def normalised_values(site: Site) -> None:
    _mixed(site, _weights, _normalised)


def unnormalised_scores(site: Site) -> None:
    _mixed(site, lambda sources, query, eps: jax.nn.softmax(jnp.sum(sources * query, axis=-1), axis=0))


def softmax_over_tokens(site: Site) -> None:
    _mixed(
        site, lambda sources, query, eps: jax.nn.softmax(jnp.sum(_normalised(sources, eps) * query, axis=-1), axis=-1)
    )


def scores_scaled_by_the_root_of_the_width(site: Site) -> None:
    _mixed(site, lambda sources, query, eps: _weights(sources, query / query.shape[-1] ** 0.5, eps))


def plain_average(site: Site) -> None:
    _mixed(site, lambda sources, query, eps: jnp.full(sources.shape[:-1], 1 / len(sources)))


def no_output_mix(site: Site) -> None:
    def enter(residuals: Residuals, mixing: Any, row: Any, norm: Any, _: Any) -> Any:
        return norm(residuals.prefix if residuals.update is None else residuals.prefix + residuals.update), None

    site.patch.setattr(whole_model, "enter", enter)


def output_mix_without_the_last_sum(site: Site) -> None:
    site.replace(
        whole_model, "enter", lambda enter: lambda r, *rest: enter(Residuals(r.blocks[:-1], r.blocks[-1]), *rest)
    )


def norm_weight_left_out_of_the_query(site: Site) -> None:
    site.change("_res_norm.weight", np.ones_like)


def sites_swapped(site: Site) -> None:
    site.swap("self_attention_res_proj.weight", "mlp_res_proj.weight")


def block_size_off_by_one(site: Site) -> None:
    site.sizes = dataclasses.replace(site.sizes, block_size=site.sizes.block_size - 1)


def norm_weight_plus_one(site: Site) -> None:
    site.change("layernorm.weight", lambda x: x + 1)


def norm_subtracts_the_mean(site: Site) -> None:
    def make(call: Any) -> Any:
        return lambda x, *rest: call(x - jnp.mean(x, axis=-1, keepdims=True), *rest)

    site.replace(norm_op, "rms_norm", make)


def norms_swapped(site: Site) -> None:
    site.swap("input_layernorm.weight", "post_attention_layernorm.weight")


def norm_eps_of_the_latents_everywhere(site: Site) -> None:
    site.sizes = dataclasses.replace(site.sizes, rms_eps=1e-6)


def no_final_norm(site: Site) -> None:
    def enter(residuals: Residuals, mixing: Any, row: Any, *_: Any) -> Any:
        return mix(residuals, mixing, row), None

    site.patch.setattr(whole_model, "enter", enter)


def embedding_scaled(site: Site) -> None:
    site.change("embed_tokens.weight", lambda x: (x.astype(np.float32) * x.shape[-1] ** 0.5).astype(x.dtype))


def head_tied_to_the_embedding(site: Site) -> None:
    site.params["lm_head.weight"] = np.asarray(site.params["model.embed_tokens.weight"], np.float32)


RIGHT = {"plain layer": plain(), "mix written down": right_mix}

FAULTS: dict[str, Plant] = {
    **{f"layer: {switch.replace('_', ' ')}": plain(**{switch: True}) for switch in PlainLayer.__dataclass_fields__},
    **{
        plant.__name__.replace("_", " "): plant
        for plant in (
            normalised_values,
            unnormalised_scores,
            softmax_over_tokens,
            scores_scaled_by_the_root_of_the_width,
            plain_average,
            no_output_mix,
            output_mix_without_the_last_sum,
            norm_weight_left_out_of_the_query,
            sites_swapped,
            block_size_off_by_one,
            norm_weight_plus_one,
            norm_subtracts_the_mean,
            norms_swapped,
            norm_eps_of_the_latents_everywhere,
            no_final_norm,
            embedding_scaled,
            head_tied_to_the_embedding,
        )
    },
}
