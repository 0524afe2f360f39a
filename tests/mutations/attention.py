"""Faults of the two attention sub-layers (text-model sections 3.1, 3.2 and 10)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.layers import mla as mla_layer
from kimi_jax.layers.kda import Kda
from kimi_jax.layers.mla import Mla
from kimi_jax.ops import norm as norm_op
from kimi_jax.ops.kda import output as kda_output
from kimi_jax.placement.collectives import Parallel
from tests.mutations.plain_kda import PlainKda
from tests.mutations.plant import CUT, Plant, Site
from tests.parity.models import TINY


def plain(**switches: bool) -> Plant:
    def plant(site: Site) -> None:
        run = jax.jit(PlainKda(**switches), static_argnames="lower_bound")
        site.wrap("kda", lambda _, *args, **kwargs: run(*args, **kwargs))

    return plant


def softplus_gate(site: Site) -> None:
    site.wrap("kda", lambda op, *args, lower_bound: op(*args, lower_bound=None))


def negative_slope(site: Site) -> None:
    site.wrap("kda", lambda op, q, k, v, f, b, a, bias, *rest, **kw: op(q, k, v, -f, b, a, -bias, *rest, **kw))


def no_decay(site: Site) -> None:
    site.wrap("kda", lambda op, q, k, v, f, *rest, **kw: op(q, k, v, jnp.full_like(f, -1e4), *rest, **kw))


def no_beta(site: Site) -> None:
    site.wrap("kda", lambda op, q, k, v, f, b, *rest, **kw: op(q, k, v, f, jnp.full_like(b, 50.0), *rest, **kw))


def a_log_from_the_padding(site: Site) -> None:
    with CheckpointFolder.open(TINY) as folder:
        for name in [name for name in site.params if name.endswith("A_log")]:
            site.params[name] = np.asarray(folder.read(f"language_model.{name}", (slice(8, 16),)), np.float32)


def a_log_in_another_head_order(site: Site) -> None:
    site.change("A_log", np.flip)


def dt_bias_channel_major(site: Site) -> None:
    kda = site.sizes.kda
    site.change("dt_bias", lambda x: x.reshape(kda.head_dim, kda.heads).T.reshape(-1))


def projections_channel_major(site: Site) -> None:
    kda = site.sizes.kda
    site.change("v_proj.weight", lambda x: x.reshape(kda.head_dim, kda.heads, -1).swapaxes(0, 1).reshape(x.shape))


def queries_and_keys_swapped(site: Site) -> None:
    site.wrap("kda", lambda op, q, k, *rest, **kw: op(k, q, *rest, **kw))


def state_transposed_between_calls(site: Site) -> None:
    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        out, state = op(*args, **kwargs)
        return out, jnp.swapaxes(state, -1, -2)

    site.cuts = CUT
    site.wrap("kda", run)


def state_lost_between_calls(site: Site) -> None:
    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        out, state = op(*args, **kwargs)
        return out, jnp.zeros_like(state)

    site.cuts = CUT
    site.wrap("kda", run)


def conv_taps_reversed(site: Site) -> None:
    site.change("conv1d.weight", lambda x: x[..., ::-1])


def one_conv_filter_for_all(site: Site) -> None:
    for name in [name for name in site.params if name.endswith("q_conv1d.weight")]:
        for other in "kv":
            site.params[name.replace("q_conv1d", f"{other}_conv1d")] = site.params[name]


def no_activation_after_conv(site: Site) -> None:
    site.patch.setattr(jax.nn, "silu", lambda x: x)
    site.recompile("short_conv")


def conv_window_after_activation(site: Site) -> None:
    def run(op: Any, x: Any, window: Any, weight: Any, lengths: Any) -> Any:
        out, _ = op(x, window, weight, lengths)
        return out, jnp.concatenate([window, out], axis=1)[:, -window.shape[1] :]

    site.cuts = CUT
    site.wrap("short_conv", run)


def conv_window_lost_between_calls(site: Site) -> None:
    site.cuts = CUT
    site.wrap("short_conv", lambda op, x, window, *rest: op(x, jnp.zeros_like(window), *rest))


def conv_windows_in_another_order(site: Site) -> None:
    def make(call: Any) -> Any:
        def run(layer: Kda, x: Any, lengths: Any, cache: Any) -> Any:
            y, cache = call(layer, x, lengths, cache)
            return y, cache._replace(conv=cache.conv[:, ::-1])

        return run

    site.cuts = CUT
    site.replace(Kda, "__call__", make)


def activation_inside_the_decay_projection(site: Site) -> None:
    def make(call: Any) -> Any:
        return lambda parallel, x, name, axis: call(parallel, jax.nn.silu(x) if name == "decay_rank" else x, name, axis)

    site.replace(Parallel, "all_gather", make)


def _gated(site: Site, combine: Any) -> None:
    """Replaces the gated output norm of KDA; ``combine(norm, out, gate)``."""

    def run(out: Any, gate: Any, weight: Any, eps: float) -> Any:
        def norm(x: Any) -> Any:
            return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

        return combine(norm, out, gate)

    site.patch.setattr(kda_output, "gated_norm", run)


def right_gate(site: Site) -> None:
    _gated(site, lambda norm, out, gate: norm(out) * jax.nn.sigmoid(gate))


def silu_gate_in_kda(site: Site) -> None:
    _gated(site, lambda norm, out, gate: norm(out) * jax.nn.silu(gate))


def gate_before_o_norm(site: Site) -> None:
    _gated(site, lambda norm, out, gate: norm(out * jax.nn.sigmoid(gate)))


def no_gate_in_kda(site: Site) -> None:
    _gated(site, lambda norm, out, gate: norm(out))


def no_o_norm(site: Site) -> None:
    _gated(site, lambda norm, out, gate: out * jax.nn.sigmoid(gate))


def o_norm_over_all_heads(site: Site) -> None:
    def combine(norm: Any, out: Any, gate: Any) -> Any:
        whole = jnp.sqrt(jnp.mean(out * out, axis=(-1, -2), keepdims=True) + 1e-5)
        each = jnp.sqrt(jnp.mean(out * out, axis=-1, keepdims=True) + 1e-5)
        return norm(out) * each / whole * jax.nn.sigmoid(gate)

    _gated(site, combine)


def _rotated(x: Any, positions: Any) -> Any:
    half = x.shape[-1] // 2
    angle = positions[..., None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def _shared_part(site: Site, change: Any) -> None:
    """Changes the shared key before it is cached: ``change(shared, positions)``."""
    rank = site.sizes.mla.kv_rank

    def make(write: Any) -> Any:
        def run(latent: Any, row: Any, starts: Any, counts: Any, **kw: Any) -> Any:
            shared = change(row[..., rank:], starts[:, None] + jnp.arange(row.shape[1]))
            return write(latent, jnp.concatenate([row[..., :rank], shared], axis=-1), starts, counts, **kw)

        return run

    site.replace(mla_layer, "write_rows", make)


def rotation_on_the_shared_dims(site: Site) -> None:
    def attend(
        op: Any, query: Any, cache: Any, expand: Any, positions: Any, *rest: Any, nope_dim: int, **kw: Any
    ) -> Any:
        shared = _rotated(query[..., nope_dim:], positions[..., None])
        query = jnp.concatenate([query[..., :nope_dim], shared], axis=-1)
        return op(query, cache, expand, positions, *rest, nope_dim=nope_dim, **kw)

    site.wrap("attend", attend)
    _shared_part(site, _rotated)


def shared_dims_dropped(site: Site) -> None:
    def attend(op: Any, query: Any, *rest: Any, nope_dim: int, **kw: Any) -> Any:
        return op(query.at[..., nope_dim:].set(0), *rest, nope_dim=nope_dim, **kw)

    site.wrap("attend", attend)


def scale_of_the_nope_part(site: Site) -> None:
    mla = site.sizes.mla
    site.wrap("attend", lambda op, query, *rest, **kw: op(query * (mla.query_dim / mla.nope_dim) ** 0.5, *rest, **kw))


def not_causal(site: Site) -> None:
    def attend(op: Any, query: Any, cache: Any, expand: Any, positions: Any, lengths: Any, **kw: Any) -> Any:
        return op(query, cache, expand, jnp.broadcast_to(lengths[:, None] - 1, positions.shape), lengths, **kw)

    site.wrap("attend", attend)


def blind_to_itself(site: Site) -> None:
    site.wrap("attend", lambda op, q, c, e, positions, *rest, **kw: op(q, c, e, positions - 1, *rest, **kw))


def positions_restart_in_every_call(site: Site) -> None:
    def make(call: Any) -> Any:
        def run(layer: Mla, x: Any, positions: Any, new: Any, lengths: Any, *cache: Any, **cut: Any) -> Any:
            return call(layer, x, positions - positions[:, :1], new, new, *cache, **cut)

        return run

    site.cuts = CUT
    site.replace(Mla, "__call__", make)


def query_halves_swapped(site: Site) -> None:
    mla = site.sizes.mla
    by_head = (mla.heads, mla.query_dim, -1)
    site.change("q_b_proj.weight", lambda x: np.roll(x.reshape(by_head), mla.shared_dim, axis=1).reshape(x.shape))


def queries_split_before_heads(site: Site) -> None:
    """All own parts first, then all shared parts: another way to read the rows."""
    mla = site.sizes.mla

    def change(x: np.ndarray) -> np.ndarray:
        own, shared = np.split(x, [mla.heads * mla.nope_dim])
        parts = [part.reshape(mla.heads, -1, x.shape[1]) for part in (own, shared)]
        return np.concatenate(parts, axis=1).reshape(x.shape)

    site.change("q_b_proj.weight", change)


def values_before_keys(site: Site) -> None:
    mla = site.sizes.mla
    by_head = (mla.heads, mla.nope_dim + mla.value_dim, -1)
    site.change("kv_b_proj.weight", lambda x: np.roll(x.reshape(by_head), mla.nope_dim, axis=1).reshape(x.shape))


def output_heads_in_another_order(site: Site) -> None:
    mla = site.sizes.mla
    for layer in site.sizes.layers_of("mla"):
        site.change(
            f"layers.{layer}.self_attn.o_proj.weight",
            lambda x: x.reshape(len(x), mla.heads, -1)[:, ::-1].reshape(x.shape),
        )


def shared_key_normalised(site: Site) -> None:
    _shared_part(site, lambda x, _: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6))


def _without_norm(site: Site, width: int) -> None:
    site.replace(norm_op, "rms_norm", lambda call: lambda x, *rest: x if x.shape[-1] == width else call(x, *rest))


def no_norm_of_the_key_latent(site: Site) -> None:
    _without_norm(site, site.sizes.mla.kv_rank)


def latent_norms_with_the_large_eps(site: Site) -> None:
    site.patch.setattr(mla_layer, "LATENT_EPS", 1e-5)


def _mla_gate(site: Site, act: Any) -> None:
    """Replaces the sigmoid of the MLA output gate."""
    site.wrap("attend", lambda op, *args, gate, **kw: op(*args, **kw) * act(gate))


def silu_gate_in_mla(site: Site) -> None:
    _mla_gate(site, jax.nn.silu)


def no_gate_in_mla(site: Site) -> None:
    _mla_gate(site, jnp.ones_like)


RIGHT = {"plain kda": plain(), "gated norm written down": right_gate}

FAULTS: dict[str, Plant] = {
    **{
        f"kda: {switch.replace('_', ' ')}": plain(**{switch: True})
        for switch in PlainKda.__dataclass_fields__
        if switch != "eps_outside_root"  # seen only by the kernel case of tiny vectors
    },
    **{
        plant.__name__.replace("_", " "): plant
        for plant in (
            softplus_gate,
            negative_slope,
            no_decay,
            no_beta,
            a_log_from_the_padding,
            a_log_in_another_head_order,
            dt_bias_channel_major,
            projections_channel_major,
            queries_and_keys_swapped,
            state_transposed_between_calls,
            state_lost_between_calls,
            conv_taps_reversed,
            one_conv_filter_for_all,
            no_activation_after_conv,
            conv_window_after_activation,
            conv_window_lost_between_calls,
            conv_windows_in_another_order,
            activation_inside_the_decay_projection,
            silu_gate_in_kda,
            gate_before_o_norm,
            no_gate_in_kda,
            no_o_norm,
            o_norm_over_all_heads,
            rotation_on_the_shared_dims,
            shared_dims_dropped,
            scale_of_the_nope_part,
            not_causal,
            blind_to_itself,
            positions_restart_in_every_call,
            query_halves_swapped,
            queries_split_before_heads,
            values_before_keys,
            output_heads_in_another_order,
            shared_key_normalised,
            no_norm_of_the_key_latent,
            latent_norms_with_the_large_eps,
            silu_gate_in_mla,
            no_gate_in_mla,
        )
    },
}
