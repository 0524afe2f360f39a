"""What a sequence leaves behind for its next token: one entry per layer, each array with named axes.

KDA layers keep a float32 state and the last inputs of their short convolution; latent-attention layers keep one row per token.
Arrays stay one per layer: a stacked cache is copied at every step (measured on the target).
"""

from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kimi_jax.config import IndexerConfig, KimiConfig
from kimi_jax.ops.implementation import Impl, choose
from kimi_jax.ops.indexer import pallas_write as index_write
from kimi_jax.ops.indexer.keys import IndexCache, encode
from kimi_jax.ops.mla import write as mla_write
from kimi_jax.ops.sample.extras import Seen
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.precision import ACTIVATIONS, FLOAT8, FLOAT32, Precision


class KdaCache(NamedTuple):
    """State of a KDA layer.

    Attributes:
      conv: the last inputs of the short convolutions of q, k and v, [rows, 3, width - 1, channels].
      state: [rows, heads, key, value], float32.
    """

    conv: Any
    state: Any


class MlaCache(NamedTuple):
    """``latent``: [rows, length, row_dim], the normalised latent and then the shared key part of every token.

    ``index``: an :class:`IndexCache` in models with an indexer, otherwise nothing.
    """

    latent: Any
    index: Any = ()


LayerCache = KdaCache | MlaCache
Cache = tuple[LayerCache, ...]


class SlotCache(NamedTuple):
    """What slots and pages hold between calls.

    Attributes:
      layers: per layer the states of all slots [slots, ...], or the pool of latent pages [pages, page, row_dim].
      kept: per recurrent layer its checkpoints [checkpoints, ...]; empty where none are kept.
      seen: ids in each slot's prompt and how often it drew each [slots, vocab], which penalties count from.
      context: per layer of a draft the pools of its context rows [pages, page, ...], in the pages of the latent rows; empty
        without a draft.
    """

    layers: Cache
    kept: tuple[KdaCache, ...]
    seen: Seen
    context: Any = ()


def describe(config: KimiConfig, batch: int, length: int, precision: Precision) -> Cache:
    """The cache as a tree of :class:`ArraySpec`: shapes, dtypes and named axes, nothing allocated.

    Args:
      batch: sequences held at once.
      length: tokens that each sequence can hold in latent-attention layers, in whole turns of the devices that share one.
    """
    states = _describe_states(config, batch, precision)
    rows = _describe_rows(config, _Held((batch, length), ("batch", "sequence")), precision)
    return tuple(states if kind == "kda" else rows for kind in config.attention)


def describe_slots(
    config: KimiConfig, slots: int, pages: int, page: int, checkpoints: int, precision: Precision
) -> SlotCache:
    """The same for ``slots`` sequences whose latent rows share ``pages`` pages of ``page`` tokens in every layer.

    Devices that share a sequence hold a part of every page: the tokens of the page that are theirs.
    """
    states = _describe_states(config, slots, precision)
    rows = _describe_rows(config, _Held((pages, page), ("pages", "sequence")), precision)
    kept: tuple[KdaCache, ...] = ()
    if checkpoints:
        kept = (_describe_states(config, checkpoints, precision),) * config.attention.count("kda")
    prompt, drawn = (
        ArraySpec((slots, config.vocab), np.dtype(dtype), ("batch", "vocab")) for dtype in (np.bool_, np.int32)
    )
    seen = Seen(cast(Any, prompt), cast(Any, drawn))
    return SlotCache(tuple(states if kind == "kda" else rows for kind in config.attention), kept, seen)


def _describe_states(config: KimiConfig, batch: int, precision: Precision) -> KdaCache:
    """The recurrent states of one KDA layer."""
    kda = config.kda
    conv = ArraySpec(
        (batch, 3, kda.conv_width - 1, kda.width),
        np.dtype(precision.activation),
        ("batch", None, None, "heads"),
        (batch, 3, kda.conv_width - 1, kda.heads),
    )
    state_shape = (batch, kda.heads, kda.head_dim, kda.head_dim)
    return KdaCache(conv, ArraySpec(state_shape, FLOAT32, ("batch", "heads", None, None), state_shape))


def describe_sources(config: KimiConfig, tokens: int, precision: Precision) -> ArraySpec:
    """What Attention Residuals keep of ``tokens`` tokens while a call runs; it does not outlive the call."""
    return ArraySpec((config.blocks, tokens, config.hidden), np.dtype(precision.activation), (None, None, "embed"))


class _Held(NamedTuple):
    """The leading dims of what is held for every token, and their named axes."""

    shape: tuple[int, int]
    axes: tuple[str | None, str | None]


def _describe_rows(config: KimiConfig, held: _Held, precision: Precision) -> MlaCache:
    shape = (*held.shape, config.mla.row_dim)
    latent = ArraySpec(shape, np.dtype(precision.latent), (*held.axes, None), shape)
    return MlaCache(latent, () if config.indexer is None else _describe_index(config.indexer, held, precision))


def _describe_index(indexer: IndexerConfig, held: _Held, precision: Precision) -> IndexCache:
    """The index keys of one layer: of 128 channels, 256 bytes a token in bfloat16, 132 in fp8, 68 in mxfp4."""
    width = indexer.head_dim

    def per_token(dtype: Any, *entries: int) -> ArraySpec:
        return ArraySpec((*held.shape, *entries), np.dtype(dtype), (*held.axes, *[None] * len(entries)))

    if precision.index == "fp8":
        return IndexCache(per_token(FLOAT8, width), per_token(FLOAT32))
    if precision.index == "mxfp4":
        return IndexCache(per_token(np.uint8, width // 2), per_token(np.uint8, -(-width // 32)))
    return IndexCache(per_token(ACTIVATIONS[precision.index], width))


UNROLLED_ROWS = 8
"""Sequences up to which their writes are separate instructions; more of them run in a loop."""


class KeyNorm(Protocol):
    """A LayerNorm: what it does, and the numbers it does it with."""

    weight: Any
    bias: Any
    eps: float

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]: ...


class Norm(Protocol):
    """A root-mean-square norm: what it does, and the numbers it does it with."""

    weight: Any
    eps: float

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]: ...


def write_rows(
    latent: Float[Array, "rows length row_dim"],
    new: Float[Array, "rows tokens row_dim"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    *,
    norm: Norm | None = None,
    pages: Int[Array, "rows pages"] | None = None,
    impl: Impl = "reference",
) -> Float[Array, "rows length row_dim"]:
    """Stores the first ``counts[b]`` new rows of each sequence from position ``starts[b]`` on; nothing else changes.

    What would lie past the end is dropped. Positions index a dimension of their own, so no flattened offset can leave 32 bits.
    A narrow cache dtype saturates.

    Args:
      norm: of the first part of a new row, as wide as its weight; the rest is stored as it comes.
      pages: for each sequence the pages of ``latent`` that hold its rows, in order; ``latent`` is then a pool
        [pages, page, row_dim]. Those that are written to must exist. Without it, sequence ``b`` is written to ``latent[b]``.
    """
    if impl == "reference":
        if norm is not None:
            width = norm.weight.shape[0]
            new = jnp.concatenate([norm(new[..., :width]), new[..., width:]], axis=-1)
        return _store(latent, _saturated(new, latent.dtype), starts, counts, pages)
    run = choose(
        "cache.write_rows", impl, {"pallas": mla_write.write, "interpret": partial(mla_write.write, interpret=True)}
    )
    weight, eps = (None, 0.0) if norm is None else (norm.weight[...], norm.eps)
    return run(latent, new, starts, counts, weight, pages, eps=eps)


def write_keys(
    index: IndexCache,
    keys: Float[Array, "rows tokens width"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    *,
    norm: KeyNorm | None = None,
    dtype: Any = None,
    pages: Int[Array, "rows pages"] | None = None,
    impl: Impl = "reference",
) -> IndexCache:
    """Stores the first ``counts[b]`` new index keys of each sequence in the cache's format, where :func:`write_rows` stores rows.

    Args:
      norm: of a new key.
      dtype: what the normalised key is rounded to before the format of the cache.
      pages: as for :func:`write_rows`; keys and scales lie in the same pages as the latent rows.
    """
    if impl != "reference":
        run = choose(
            "cache.write_keys",
            impl,
            {"pallas": index_write.write, "interpret": partial(index_write.write, interpret=True)},
        )
        weights, eps = None, 0.0
        if norm is not None:
            weights, eps = index_write.KeyNorm(norm.weight[...], norm.bias[...]), norm.eps
        return run(index, keys, starts, counts, weights, pages, eps=eps, dtype=dtype)
    if norm is not None:
        keys = norm(keys).astype(dtype)
    written = []
    for held, new in zip(jax.tree.leaves(index), jax.tree.leaves(encode(keys, index)), strict=True):
        flat = (*held.shape[:2], -1)
        written.append(
            _store(held.reshape(flat), new.reshape(*new.shape[:2], -1), starts, counts, pages).reshape(held.shape)
        )
    return jax.tree.unflatten(jax.tree.structure(index), written)


def _store(
    held: Shaped[Array, "pool page width"],
    new: Shaped[Array, "rows tokens width"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    pages: Int[Array, "rows pages"] | None,
) -> Shaped[Array, "pool page width"]:
    return _write_slices(held, new, starts, counts) if pages is None else _scatter(held, new, starts, counts, pages)


def _saturated(new: Float[Array, "rows tokens row_dim"], dtype: Any) -> Float[Array, "rows tokens row_dim"]:
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        new = jnp.clip(new.astype(jnp.float32), -limit, limit)
    return new.astype(dtype)


def _scatter(
    pool: Shaped[Array, "pool page width"],
    new: Shaped[Array, "rows tokens width"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    pages: Int[Array, "rows pages"],
) -> Shaped[Array, "pool page width"]:
    """Into pages, for XLA."""
    offset = jnp.arange(new.shape[1])
    position = starts[:, None] + offset
    page = jnp.take_along_axis(pages, position // pool.shape[1], axis=1, mode="clip")
    real = (offset < counts[:, None]) & (position < pages.shape[1] * pool.shape[1])
    return pool.at[jnp.where(real, page, pool.shape[0]), position % pool.shape[1]].set(new, mode="drop")


def _write_slices(
    latent: Shaped[Array, "rows length width"],
    new: Shaped[Array, "rows tokens width"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
) -> Shaped[Array, "rows length width"]:
    """Row by row, for XLA."""
    size = min(new.shape[1], latent.shape[1])

    def write(
        row: int | Int[Array, ""], held: Shaped[Array, "rows length width"]
    ) -> Shaped[Array, "rows length width"]:
        # slices, not a scatter: a CPU widens the whole of a narrow cache to scatter into it. They clamp at the end, so old rows
        # under the window are put back.
        first = jnp.clip(starts[row], 0, latent.shape[1] - size)
        source = first - starts[row] + jnp.arange(size)
        fresh = (source >= 0) & (source < counts[row])
        under = jax.lax.dynamic_slice(held, (row, first, 0), (1, size, latent.shape[2]))
        moved = new[row][jnp.clip(source, 0, new.shape[1] - 1)] if size > 1 else new[row][:1]
        window = jnp.where(fresh[:, None], moved, under[0])[None]
        return jax.lax.dynamic_update_slice(held, window, (row, first, 0))

    if latent.shape[0] > UNROLLED_ROWS:
        return jax.lax.fori_loop(0, latent.shape[0], write, latent)
    for row in range(latent.shape[0]):
        latent = write(row, latent)
    return latent


def read_states(held: KdaCache, rows: Int[Array, " n"]) -> KdaCache:
    """The recurrent states of some rows; -1 gives those of a sequence that starts."""

    def read(array: Any) -> Any:
        mask = (rows >= 0).reshape(-1, *[1] * (array.ndim - 1))
        return jnp.where(mask, array[jnp.maximum(rows, 0)], jnp.zeros((), array.dtype))

    return KdaCache(*map(read, held))


def write_states(held: KdaCache, rows: Int[Array, " n"], new: KdaCache) -> KdaCache:
    """Puts recurrent states in some rows; -1 puts nothing. No row twice."""

    def write(array: Any, values: Any) -> Any:
        return array.at[jnp.where(rows >= 0, rows, array.shape[0])].set(values, mode="drop")

    return KdaCache(*map(write, held, new))


def copy_states(
    source: tuple[KdaCache, ...],
    rows: Int[Array, " n"],
    target: tuple[KdaCache, ...],
    to: Int[Array, " n"],
) -> tuple[KdaCache, ...]:
    """``target`` with rows ``to`` set to ``rows`` of ``source``, layer by layer; see the two above for -1."""
    return tuple(write_states(old, to, read_states(new, rows)) for old, new in zip(target, source, strict=True))


def reset(cache: Cache, fresh: Bool[Array, " rows"]) -> Cache:
    """Starts new sequences: clears the recurrent parts of the rows marked ``fresh``.

    Latent rows need no clearing: nothing past a sequence's length is ever read.
    """

    def clear(array: Any) -> Any:
        mask = fresh.reshape(-1, *[1] * (array.ndim - 1))
        return jnp.where(mask, jnp.zeros((), array.dtype), array)

    return tuple(KdaCache(*map(clear, entry)) if isinstance(entry, KdaCache) else entry for entry in cache)
