"""One call of the model as parts that placement can hold against a device: bytes, operations, collectives and launches.

The bytes come from the declared trees. The collectives are those that the layers write; a test counts them in the
traced step.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_jax.cache import Cache, KdaCache, MlaCache
from kimi_jax.config import KimiConfig
from kimi_jax.ops.mla.api import DIRECT_FROM
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.roofline import PEAKS, Collective, Work, expected_busiest, product_flops
from kimi_jax.planning.exchange import Local, collectives
from kimi_jax.planning.parts import CATEGORY_OF, part_of
from kimi_jax.precision import Precision

OP_LAUNCHES = {"kda": 5, "mla": 5, "dense": 1, "moe": 3, "layer": 4, "model": 4}
"""Kernels beside the projections, one per op: KDA three convolutions, delta rule, gated norm; MLA two norms, row write,
attention, gate; dense the gated unit; MoE choice, gated unit, norm; a layer two mixes and two norms; the model
embedding, mix, norm, draw."""

EXPERT_LAUNCHES = 2
"""Gate and up with their gated unit, then down."""


@dataclass(frozen=True)
class Step:
    """One call on the average device.

    Attributes:
      work: its parts.
      collectives: what it exchanges.
      tokens: new tokens of the call over the whole mesh.
    """

    work: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    tokens: int

    @property
    def bytes(self) -> float:
        """Bytes that one device must move."""
        return math.fsum(part.bytes for part in self.work if not part.on_chip)

    @property
    def flops(self) -> float:
        """Operations of one device, all dtypes."""
        return math.fsum(count for part in self.work for _, count in part.flops)


def touched_experts(config: KimiConfig, tokens: float) -> float:
    """Distinct experts that ``tokens`` tokens are expected to choose, each choosing evenly."""
    moe = config.moe
    return moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)


def step(
    config: KimiConfig,
    layout: Layout,
    parameters: Mapping[str, ArraySpec],
    cache: Cache,
    precision: Precision,
    *,
    rows: int,
    tokens: int,
    context: int,
    held: bool = False,
) -> Step:
    """One call.

    Args:
      parameters: loaded parameters by dotted path; those of vision and draft take no part.
      cache: the cache's description; only its bytes per row and per token count.
      rows: sequences of the call, over the whole mesh.
      tokens: new tokens of each sequence.
      context: cached tokens of each sequence before the call.
      held: a verification: every token is scored, and states are read once more for the fold that follows the verdict.
    """
    parallel = Parallel.of(layout)
    local = Local(rows / parallel.size("batch"), tokens, context, held)
    operand = PEAKS[precision.projection.name]
    parts = _weights(config, layout, parameters, local, operand)
    parts += _sequence_mixing(config, parallel, local, operand)
    parts += _cached(config, layout, cache, local)
    width = config.hidden * precision.activation.itemsize
    parts.append(Work("attn_res", local.new * width * _sources(config), on_chip=True))
    merged = [
        _merge(part, [work for work in parts if work.part == part]) for part in dict.fromkeys(w.part for w in parts)
    ]
    return Step(tuple(merged), tuple(collectives(config, parallel, precision, local)), rows * tokens)


def _weights(
    config: KimiConfig, layout: Layout, parameters: Mapping[str, ArraySpec], local: Local, operand: str
) -> list[Work]:
    """Every parameter once, experts by how many are touched, the embedding by row."""
    moe, parts = config.moe, []
    touched = touched_experts(config, local.new)
    shares = layout.parts("expert")
    spread = expected_busiest(touched, shares, moe.experts // shares)
    alike = Counter(
        (part_of(name, config), name.endswith("kv_b_proj.weight"), spec) for name, spec in parameters.items()
    )
    for (part, expands, spec), count in alike.items():
        held = count * layout.local_bytes(spec)
        if part in ("vision", "draft"):
            continue
        if part == "embedding":
            parts.append(Work(part, local.new * spec.nbytes / spec.shape[0] / layout.parts("vocab")))
        elif part == "routed_experts":
            parts.append(Work(part, held * touched / moe.experts, spread=spread))
        elif len(spec.shape) != 2 or part == "residual_rows":
            parts.append(Work(part, held))
        else:
            inputs = local.scored if part == "head" else local.new
            if expands and _expands(config, local):
                inputs = local.rows * (local.context + local.tokens)  # keys and values of every cached row
            parts.append(Work(part, held, (product_flops(spec, layout, count * inputs),), launches=count))
    sparse, dense = config.layers - config.dense_layers, config.dense_layers
    flops = sparse * local.new * moe.top_k * 3 * 2 * moe.width * moe.latent
    flops /= layout.parts("expert") * layout.parts("expert_ffn")
    experts = Work("routed_experts", 0, ((operand, flops),), sparse * EXPERT_LAUNCHES, spread)
    ops = {"router": sparse * OP_LAUNCHES["moe"], "dense_mlp": dense * OP_LAUNCHES["dense"]}
    ops["norms"] = config.layers * OP_LAUNCHES["layer"] + OP_LAUNCHES["model"]
    parts += [experts, *(Work(part, 0, launches=count) for part, count in ops.items())]
    order = list(CATEGORY_OF)
    return sorted(parts, key=lambda work: order.index(work.part))


def _sequence_mixing(config: KimiConfig, parallel: Parallel, local: Local, operand: str) -> list[Work]:
    """What attention multiplies beside its projections."""
    kda, mla, indexer = config.kda, config.mla, config.indexer
    kda_layers, mla_layers = len(config.layers_of("kda")), len(config.layers_of("mla"))
    rule = kda_layers * local.new * kda.heads * kda.head_dim**2 * 6 / parallel.size("heads")
    pairs = local.rows * visible(local.context, local.tokens, None if indexer is None else indexer.top_k)
    per_pair = mla.query_dim + mla.value_dim if _expands(config, local) else mla.row_dim + mla.kv_rank
    attention = mla_layers * pairs * mla.heads * 2 * per_pair / parallel.size("heads", "sequence")
    parts = [
        Work("kda_state", 0, (("fp32", rule),), kda_layers * OP_LAUNCHES["kda"]),
        Work("latent", 0, ((operand, attention),), mla_layers * OP_LAUNCHES["mla"]),
    ]
    if indexer is not None:
        scored = local.rows * visible(local.context, local.tokens)
        scores = mla_layers * scored * indexer.heads * indexer.head_dim * 2
        parts.append(Work("index_keys", 0, ((operand, scores / parallel.size("index_heads", "sequence")),), mla_layers))
    return parts


def visible(context: int, tokens: int, most: int | None = None) -> int:
    """Cached rows that the new tokens of one sequence attend to, each itself included, at most ``most`` a token."""
    last = context + tokens
    capped = 0 if most is None else min(max(last - most, 0), tokens)
    free = tokens - capped
    return free * (2 * context + free + 1) // 2 + capped * (most or 0)


def _expands(config: KimiConfig, local: Local) -> bool:
    """Whether attention expands cached rows to keys and values; chosen rows (K3.1 Pro) are used as they are."""
    few = config.indexer is None or local.context + local.tokens <= config.indexer.top_k
    return local.tokens >= DIRECT_FROM and few


def _cached(config: KimiConfig, layout: Layout, cache: Cache, local: Local) -> list[Work]:
    """State read and written whole; latent rows and index keys read as far as they are seen, new ones written."""
    parts = []
    passes = 3 if local.held else 2
    after = local.context + local.tokens
    read = after if config.indexer is None else min(after, local.tokens * config.indexer.top_k)
    for entry in cache:
        if isinstance(entry, KdaCache):
            for part, spec in (("kda_state", entry.state), ("kda_conv", entry.conv)):
                parts.append(Work(part, passes * local.rows * _per_row(spec, layout)))
            if local.held:
                parts.append(Work("records", 2 * local.new * record_bytes(entry, layout)))
            continue
        assert isinstance(entry, MlaCache)
        parts.append(Work("latent", local.rows * _latent_bytes(entry.latent, layout, local, read)))
        if entry.index:
            keys = [spec for spec in (entry.index.keys, entry.index.scales) if spec]
            held = math.fsum(_per_token(spec, layout) for spec in keys)
            parts.append(Work("index_keys", local.rows * (after + local.tokens) * held))
    return parts


def record_bytes(entry: KdaCache, layout: Layout) -> float:
    """Bytes that a verification keeps of one token in one layer on one device: keys, decays and writes; raw q, k and v."""
    _, heads, key, value = layout.local_shape(entry.state)
    inputs = _per_row(entry.conv, layout) / entry.conv.shape[2]
    return heads * (2 * key + value) * entry.state.dtype.itemsize + inputs


def _latent_bytes(spec: ArraySpec, layout: Layout, local: Local, read: int) -> float:
    """Bytes of one sequence's latent rows: ``read`` ones read, new ones written.

    A long call of a cut sequence gathers the rows first: each device sends its share, and writes and reads the whole.
    """
    held, parts = _per_token(spec, layout), layout.parts("sequence")
    if parts == 1 or local.tokens < DIRECT_FROM:
        return (read + local.tokens) * held
    after = local.context + local.tokens
    return (after + local.tokens) * held + (after + read) * held * parts


def _per_row(spec: ArraySpec, layout: Layout) -> float:
    return layout.local_bytes(spec) / layout.local_shape(spec)[0]


def _per_token(spec: ArraySpec, layout: Layout) -> float:
    """Bytes of one cached token on the average device."""
    return _per_row(spec, layout) / spec.shape[1]


def _sources(config: KimiConfig) -> int:
    """Source vectors that the mixes of one token read, and the mixed ones they write."""
    starts = [layer // config.block_size for layer in range(config.layers)]
    before = [-(-layer // config.block_size) + 1 if layer else 0 for layer in range(config.layers)]
    return sum(before) + sum(start + 2 for start in starts) + config.blocks + 1 + 2 * config.layers


def _merge(part: str, works: list[Work]) -> Work:
    flops: dict[str, float] = {}
    for work in works:
        for dtype, count in work.flops:
            flops[dtype] = flops.get(dtype, 0.0) + count
    return Work(
        part,
        math.fsum(work.bytes for work in works),
        tuple(flops.items()),
        sum(work.launches for work in works),
        max(work.spread for work in works),
        all(work.on_chip for work in works),
    )
