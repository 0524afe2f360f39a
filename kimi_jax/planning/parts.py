"""What a parameter is part of, by its dotted path, and the rows of the published byte table that the parts make."""

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from kimi_jax.config import KimiConfig

DRAFT = "draft."
"""Prefix of a draft's parameters beside the model's own."""

CATEGORY_OF: Mapping[str, str] = MappingProxyType(
    {
        "dense_mlp": "dense_mlp",
        "routed_experts": "routed",
        "shared_experts": "shared",
        "kda_projections": "kda_gemm",
        "mla_projections": "mla_gemm",
        "norms": "norm",
        "embedding": "other",
        "head": "other",
        "latent_projections": "other",
        "router": "other",
        "kda_gates": "other",
        "residual_rows": "other",
        "indexer": "indexer",
        "vision": "vision",
        "draft": "draft",
    }
)
"""Part of a step -> row of the byte table, both in the order in which they are shown."""

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "dense_mlp": "dense MLP (layer 0)",
        "routed": "routed experts (MXFP4)",
        "shared": "shared experts",
        "kda_gemm": "KDA projections",
        "mla_gemm": "MLA projections",
        "norm": "norms",
        "other": "other",
        "indexer": "indexers",
        "vision": "vision",
        "draft": "draft",
        "latent": "MLA latent rows",
        "index_keys": "index keys",
        "kda_state": "KDA state",
        "kda_conv": "KDA convolution window",
        "attn_res": "AttnRes sources of a chunk",
        "draft_context": "draft context rows",
    }
)
"""What tables call the rows of weights and of running state."""

_BY_NAME = (
    ("draft", rf"^{re.escape(DRAFT)}"),
    ("vision", r"^(vision_tower|mm_projector)\."),
    ("indexer", r"\.indexer\."),
    ("norms", r"norm\.weight$"),
    ("routed_experts", r"\.experts\."),
    ("shared_experts", r"\.shared_experts\."),
    ("dense_mlp", r"\.mlp\."),
    ("latent_projections", r"\.routed_expert_(down|up)_proj\."),
    ("router", r"\.block_sparse_moe\.gate\."),
    ("embedding", r"embed_tokens\.weight$"),
    ("head", r"^lm_head\."),
    ("residual_rows", r"_res_proj\.weight$"),
    ("kda_gates", r"\.self_attn\.([qkv]_conv1d\.weight|A_log|dt_bias)$"),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.")


def part_of(name: str, config: KimiConfig) -> str:
    """The part of a step that reads a parameter.

    Raises:
      ValueError: no rule covers the name: a new parameter needs a place in the tables.
    """
    part = _named(name)
    if isinstance(part, str):
        return part
    return "kda_projections" if config.attention[part] == "kda" else "mla_projections"


@lru_cache(maxsize=1 << 15)
def _named(name: str) -> str | int:
    """The part, or the layer whose attention it projects for."""
    for part, pattern in _BY_NAME:
        if re.search(pattern, name):
            return part
    layer = _LAYER.search(name)
    if layer is None:
        raise ValueError(f"{name} belongs to no part of the plan")
    return int(layer[1])


def category_of(name: str, config: KimiConfig) -> str:
    """The row of the byte table that counts a parameter."""
    return CATEGORY_OF[part_of(name, config)]
