"""Not-a-number in everything on a real device that no later call of an engine may read."""

from typing import Any

import jax
import numpy as np

from kimi_jax.cache import KdaCache
from kimi_jax.engine.engine import Engine


def poison(engine: Engine) -> None:
    """Free pages and the rows beyond every sequence, states of free slots, checkpoints that nobody holds."""
    groups = engine._scheduler.groups
    pages, states, kept = (
        [_free(getattr(group, name)) for group in groups] for name in ("pages", "slots", "checkpoints")
    )
    beyond = [(s.group, s.pages, s.position) for s in engine._scheduler.running]

    def states_of(entry: KdaCache, free: list[list[int]]) -> KdaCache:
        return KdaCache(*(_spoil(array, free) for array in entry))

    def layer(entry: Any) -> Any:
        if isinstance(entry, KdaCache):
            return states_of(entry, states)
        return entry._replace(latent=pool_of(entry.latent))

    def pool_of(array: jax.Array) -> jax.Array:
        pool = np.array(_spoil(array, pages))
        local, page = len(pool) // len(groups), pool.shape[1]
        for group, held, position in beyond:
            for index, number in enumerate(held):
                pool[group * local + number, max(position - index * page, 0) :] = np.nan
        return jax.device_put(pool, array.sharding)

    cache = engine._cache
    engine._cache = cache._replace(
        layers=tuple(map(layer, cache.layers)),
        kept=tuple(states_of(entry, kept) for entry in cache.kept),
        context=jax.tree.map(pool_of, cache.context),
    )


def _free(pool: Any) -> list[int]:
    return [place for place in range(pool.size) if not pool.users(place)]


def _spoil(array: jax.Array, free: list[list[int]]) -> jax.Array:
    values = np.array(array)
    local = len(values) // len(free)
    for group, places in enumerate(free):
        values[[group * local + place for place in places]] = np.nan
    return jax.device_put(values, array.sharding)
