"""The kernels that a step of a model must call where its ops run kernels, by name, and how often at least."""

from kimi_jax.config import KimiConfig
from kimi_jax.ops.implementation import Implementations
from kimi_jax.ops.kda.api import kernel_problems
from kimi_jax.ops.kda.pallas_step import MOST_TOKENS
from kimi_jax.ops.linear.pallas import MOST_ROWS
from kimi_jax.ops.mla.api import DIRECT_FROM
from kimi_jax.ops.mla.entry import MOST_QUERIES
from kimi_jax.ops.moe.kernels import FEW_TOKENS, ROUTED_TOKENS
from kimi_jax.placement.lowered import Launch


def expected_kernels(
    config: KimiConfig, impls: Implementations, rows: int, tokens: int, random: bool, length: int, fp8: bool = False
) -> dict[Launch, int]:
    """Kernel -> fewest calls of a step: one for every layer whose op runs it.

    Args:
      config: says which layer has which op.
      impls: what each op runs.
      rows: sequences of one device's step.
      tokens: new tokens of each.
      random: whether rows may draw with a temperature, which is XLA's.
      length: tokens that each can hold: an indexer that keeps as many chooses nothing.
      fp8: whether attention projections are in FP8.
    """
    indexer, latent_layers = config.indexer, len(config.layers_of("mla"))
    chooses = indexer is not None and length > indexer.top_k
    every = {
        "attn_res": (config.layers, ("mix_norm",)),
        "kda": _kda(config, tokens),
        "linear": (config.layers if rows * tokens <= MOST_ROWS else 0, ("project",)),
        "indexer": (latent_layers if indexer is not None else 0, _indexer(chooses)),
        "mla": (latent_layers, _mla(rows, tokens, chooses, fp8)),
        "moe": (config.layers - config.dense_layers, _moe(rows * tokens)),
        "sample": (0 if random else 1, ("look", "merge")),
    }
    return {
        Launch(op, name): layers
        for op, (layers, names) in every.items()
        for name in names
        if layers and getattr(impls, op) == "pallas"
    }


def _kda(config: KimiConfig, tokens: int) -> tuple[int, tuple[str, ...]]:
    built = not kernel_problems(config.kda.gate_lower_bound, config.kda.head_dim)
    names = ("kda_step",) if tokens <= MOST_TOKENS else ("kda_chunks", "kda_carry")
    return len(config.layers_of("kda")) if built else 0, names


def _indexer(chooses: bool) -> tuple[str, ...]:
    return "index_write", *(("index_scores", "index_top_k") if chooses else ())


def _mla(rows: int, tokens: int, chooses: bool, fp8: bool) -> tuple[str, ...]:
    few = tokens < DIRECT_FROM
    if not few and not chooses:
        return "mla_write", "mla_expand", "mla_attend_block"
    entry = ("mla_absorb_write",) if few else ("mla_write", "mla_absorb")
    if rows * tokens <= MOST_QUERIES and not fp8:
        entry = ("mla_enter",)
    return *entry, "mla_attend_selected" if chooses else "mla_attend", "mla_merge_expand"


def _moe(tokens: int) -> tuple[str, ...]:
    if tokens <= ROUTED_TOKENS:
        return "moe_route_up", "moe_down"
    few = tokens <= FEW_TOKENS
    return "moe_route", *(("moe_up", "moe_down") if few else ("moe_group", "moe_up_tiles", "moe_down_tiles", "moe_sum"))
