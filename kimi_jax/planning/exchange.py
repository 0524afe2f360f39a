"""The collectives of one call, as the layers write them: what, how often, how many bytes, among how many devices."""

from dataclasses import dataclass

from kimi_jax.config import KimiConfig
from kimi_jax.ops.context.rows import BLOCK as ROWS
from kimi_jax.ops.mla.api import DIRECT_FROM
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.roofline import Collective, CollectiveKind
from kimi_jax.precision import FLOAT32, Precision

SAMPLE_NUMBERS = 6
"""Float32 numbers of a row that each share of the vocabulary hands in when an id is drawn (ops/sample/api.py)."""


@dataclass(frozen=True)
class Local:
    """The tokens of one call on one device.

    Attributes:
      rows: sequences.
      tokens: new tokens of each.
      context: cached tokens of each before the call.
      held: whether recurrent states stay as they are until a verdict, and every token is scored: a verification.
    """

    rows: float
    tokens: int
    context: int
    held: bool = False

    @property
    def new(self) -> float:
        """New tokens of all sequences."""
        return self.rows * self.tokens

    @property
    def scored(self) -> float:
        """Tokens that the head scores."""
        return self.new if self.held else self.rows


def collectives(config: KimiConfig, parallel: Parallel, precision: Precision, local: Local) -> list[Collective]:
    """Every collective of a greedy call that draws one id per row, or judges every token of a verification."""
    item = precision.activation.itemsize
    hidden = local.new * config.hidden * item
    kda, mla = len(config.layers_of("kda")), len(config.layers_of("mla"))
    found = [
        _one(parallel, "embedding", "all-reduce", 1, hidden, "vocab"),
        _one(parallel, "attention", "all-reduce", kda + mla, hidden, "heads"),
        _one(parallel, "decay rank", "all-gather", kda, local.new * config.kda.head_dim * item, "decay_rank"),
        _one(parallel, "query latent", "all-gather", mla, local.new * config.mla.q_rank * item, "q_lora"),
        _one(parallel, "dense MLP", "all-reduce", config.dense_layers, hidden, "ffn"),
        *_experts(config, parallel, local.new, item),
        *_split_sequence(config, parallel, precision, local),
        _one(
            parallel, "drawn ids", "all-gather", 1, local.scored * SAMPLE_NUMBERS * 4 * parallel.size("vocab"), "vocab"
        ),
        _one(parallel, "rows still running", "all-reduce", 1, 4, "batch"),
    ]
    return [each for each in found if each.participants > 1 and each.count]


def _experts(config: KimiConfig, parallel: Parallel, new: float, item: int) -> list[Collective]:
    """Router and latent gathered together, routed and shared sums reduced together, where their mesh axes agree."""
    layers, moe = config.layers - config.dense_layers, config.moe
    routed, shared = new * moe.latent * item, new * config.hidden * item
    logits, latent = new * moe.experts * FLOAT32.itemsize, routed
    axes = {name: set(parallel.mesh_axes(*names)) for name, names in _REDUCED.items()}
    found = []
    if axes["router"] and axes["router"] == axes["latent"]:
        both = ("router and latent", "all-gather", layers, logits + latent, "latent")
        found.append(_one(parallel, *both))
    else:
        found.append(_one(parallel, "router", "all-gather", layers, logits, "router_expert"))
        found.append(_one(parallel, "latent", "all-gather", layers, latent, "latent"))
    if not axes["latent"]:
        found += _sums(parallel, layers, ("routed", routed, ("expert", "expert_ffn")), ("shared", shared, ("ffn",)))
        return found
    found.append(_one(parallel, "routed", "all-reduce", layers, routed, "expert", "expert_ffn"))
    if axes["latent"] == axes["shared"]:
        found.append(_one(parallel, "up and shared", "all-reduce", layers, shared, "ffn"))
    else:
        found.append(_one(parallel, "up", "all-reduce", layers, shared, "latent"))
        found.append(_one(parallel, "shared", "all-reduce", layers, shared, "ffn"))
    return found


_REDUCED = {
    "router": ("router_expert",),
    "latent": ("latent",),
    "routed": ("expert", "expert_ffn"),
    "shared": ("ffn",),
}
"""Value -> named axes that its share is cut by."""


def _sums(
    parallel: Parallel,
    count: int,
    first: tuple[str, float, tuple[str, ...]],
    second: tuple[str, float, tuple[str, ...]],
) -> list[Collective]:
    """Two sums, in one all-reduce where their mesh axes agree."""
    if set(parallel.mesh_axes(*first[2])) == set(parallel.mesh_axes(*second[2])):
        name = f"{first[0]} and {second[0]}"
        return [_one(parallel, name, "all-reduce", count, first[1] + second[1], *first[2])]
    return [_one(parallel, name, "all-reduce", count, size, *axes) for name, size, axes in (first, second)]


def _split_sequence(config: KimiConfig, parallel: Parallel, precision: Precision, local: Local) -> list[Collective]:
    """Decode context parallelism (ops/context): gathered queries and joined outputs, or gathered rows; chosen keys."""
    shares = parallel.size("sequence")
    if shares == 1:
        return []
    mla, layers, new = config.mla, len(config.layers_of("mla")), local.new
    found: list[Collective] = []
    if config.indexer is not None:
        size = new * config.indexer.top_k * 2 * FLOAT32.itemsize * shares
        found.append(Collective("chosen keys", "all-gather", layers, size, shares))
    if local.tokens >= DIRECT_FROM:
        length = local.context + local.tokens
        blocks = -(-length // ROWS)
        size = local.rows * length * mla.row_dim * precision.latent.itemsize / blocks
        return [*found, Collective("cached rows", "all-gather", layers * blocks, size, shares)]
    # of the devices that share a sequence, those that hold other heads
    others = parallel.common("sequence", "heads")
    heads = mla.heads * others / parallel.size("heads")
    queries, sums = new * heads * mla.row_dim * precision.activation.itemsize, new * heads * FLOAT32.itemsize
    found += [
        Collective("queries", "all-gather", layers, queries, others),
        Collective("softmax sums", "all-gather", layers, sums * shares, shares),
        Collective("latent outputs", "reduce-scatter", layers, sums * mla.kv_rank, others),
    ]
    if others < shares:
        size = sums * mla.kv_rank / others
        found.append(Collective("latent outputs of equal heads", "all-reduce", layers, size, shares // others))
    return found


def _one(parallel: Parallel, part: str, kind: CollectiveKind, count: int, size: float, *names: str) -> Collective:
    return Collective(part, kind, count, size, parallel.size(*names))
