"""Faults of the sparse indexer (K3.1 Pro notes, sections 2, 4 and 5): those that the fixture k31-tiny says it guards against."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.layers import decoder
from kimi_jax.layers import mla as mla_layer
from kimi_jax.layers.indexer import Indexer, KeyNorm
from kimi_jax.layers.mla import Mla
from tests.mutations.plain_select import PlainSelect
from tests.mutations.plant import Plant, Site
from tests.mutations.residuals import mix

SEVERAL = (8, 52)
"""Where a prompt is cut into calls, the first of which runs dense."""


def plain(**switches: bool) -> Plant:
    def plant(site: Site) -> None:
        run = PlainSelect(**switches)
        site.patch.setattr(Mla, "_select", lambda *args: run(*args))

    return plant


def _key_norm(site: Site, norm: Any) -> None:
    """Replaces the norm of the keys: ``norm(x, weight, bias, eps)``."""

    def make(_: Any) -> Any:
        return lambda layer, x: norm(x, layer.weight[...], layer.bias[...], layer.eps)

    site.replace(KeyNorm, "__call__", make)


def _scaled(x: Any, eps: float, *, centred: bool = True, fewer: int = 0) -> Any:
    middle = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.sum(middle**2, axis=-1, keepdims=True) / (x.shape[-1] - fewer)
    return (middle if centred else x) * jax.lax.rsqrt(variance + eps)


def right_key_norm(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, eps) * weight + bias)


def rms_norm_of_keys(site: Site) -> None:
    def norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * weight + bias

    _key_norm(site, norm)


def keys_not_centred(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, eps, centred=False) * weight + bias)


def eps_of_the_relatives(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, 1e-6) * weight + bias)


def key_weight_missing(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, eps) + bias)


def key_bias_missing(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, eps) * weight)


def bias_before_weight(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: (_scaled(x, eps) + bias) * weight)


def variance_over_one_less(site: Site) -> None:
    _key_norm(site, lambda x, weight, bias, eps: _scaled(x, eps, fewer=1) * weight + bias)


def query_heads_not_major(site: Site) -> None:
    index = site.sizes.indexer
    assert index is not None
    site.change("wq_b.weight", lambda x: x.reshape(index.head_dim, index.heads, -1).swapaxes(0, 1).reshape(x.shape))


def _query_norm(site: Site, norm: Any) -> None:
    """Replaces what the index queries are made of: ``norm(latent, weight, eps)``."""

    def make(_: Any) -> Any:
        def ask(layer: Indexer, latent: Any, given: Any) -> Any:
            q = norm(latent, given.weight[...], given.eps) @ layer.wq_b.weight[...].astype(jnp.float32).T
            return q.reshape(*latent.shape[:2], -1, layer.sizes.head_dim)

        return ask

    site.replace(Indexer, "ask", make)


def queries_from_the_raw_latent(site: Site) -> None:
    _query_norm(site, lambda latent, weight, eps: latent)


def queries_without_the_norms_weight(site: Site) -> None:
    def norm(latent: Any, weight: Any, eps: float) -> Any:
        return latent * jax.lax.rsqrt(jnp.mean(latent**2, axis=-1, keepdims=True) + eps)

    _query_norm(site, norm)


def keys_and_weights_from_the_raw_input(site: Site) -> None:
    last: list[Any] = []

    def enter(call: Any) -> Any:
        def run(residuals: Any, mixing: Any, row: Any, *rest: Any) -> Any:
            last[:] = [mix(residuals, mixing, row)]
            return call(residuals, mixing, row, *rest)

        return run

    site.replace(decoder, "enter", enter)
    site.replace(Indexer, "read", lambda read: lambda layer, x: read(layer, last[0]))


def everything_dense(site: Site) -> None:
    site.patch.setattr(mla_layer, "cond", lambda few, dense, sparse: dense())


def last_full_layer_dense(site: Site) -> None:
    turns = iter([False, False, True] * 3)
    site.patch.setattr(mla_layer, "cond", lambda few, dense, sparse: dense() if next(turns) or few else sparse())


def keys_of_dense_calls_not_cached(site: Site) -> None:
    def make(write: Any) -> Any:
        def run(index: Any, keys: Any, starts: Any, counts: Any, **kw: Any) -> Any:
            few = starts + counts <= 8
            return write(index, jnp.where(few[:, None, None], 0, keys), starts, counts, **kw)

        return run

    site.cuts = SEVERAL
    site.replace(mla_layer, "write_keys", make)


def keys_written_one_late(site: Site) -> None:
    def make(write: Any) -> Any:
        return lambda index, keys, starts, counts, **kw: write(index, keys, starts + 1, counts, **kw)

    site.cuts = SEVERAL
    site.replace(mla_layer, "write_keys", make)


def top_k_of_the_config_ignored(site: Site) -> None:
    index = site.sizes.indexer
    assert index is not None
    site.sizes = dataclasses.replace(site.sizes, indexer=dataclasses.replace(index, top_k=16))


def constants_left_out(site: Site) -> None:
    """No fault in logits: a positive factor of every score."""

    def make(read: Any) -> Any:
        def run(layer: Indexer, x: Any) -> Any:
            keys, weights = read(layer, x)
            return keys, weights * np.sqrt(layer.sizes.heads * layer.sizes.head_dim)

        return run

    site.replace(Indexer, "read", make)


RIGHT = {"plain select": plain(), "key norm written down": right_key_norm, "constants left out": constants_left_out}

SWITCHES = [field.name for field in dataclasses.fields(PlainSelect) if field.name != "chosen"]

FAULTS: dict[str, Plant] = {
    **{f"select: {switch.replace('_', ' ')}": plain(**{switch: True}) for switch in SWITCHES},
    **{
        plant.__name__.replace("_", " "): plant
        for plant in (
            rms_norm_of_keys,
            keys_not_centred,
            eps_of_the_relatives,
            key_weight_missing,
            key_bias_missing,
            bias_before_weight,
            variance_over_one_less,
            query_heads_not_major,
            queries_from_the_raw_latent,
            queries_without_the_norms_weight,
            keys_and_weights_from_the_raw_input,
            everything_dense,
            last_full_layer_dense,
            keys_of_dense_calls_not_cached,
            keys_written_one_late,
            top_k_of_the_config_ignored,
        )
    },
}
