"""A new draft for a target: sizes that follow from it where none are given, and its first weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kimi_jax.config import KimiConfig
from kimi_jax.draft.config import PUBLISHED, DraftConfig, GqaSizes, MlaSizes
from kimi_jax.draft.config_read import DraftSpec, Stream
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.draft.rope import RopeConfig
from kimi_jax.precision import Precision
from kimi_jax.train.state import TrainingError

Backbone = Literal["gqa", "mla"]

PUBLISHED_HIDDEN = 7168
"""Targets of this width get the published sizes."""

TAPS = 5
"""Tapped layers of a deep target."""

GQA_KEYS, MLA_KEYS = (
    ("heads", "kv_heads", "head_dim"),
    ("heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"),
)


def new_draft(
    target: KimiConfig,
    backbone: Backbone = "gqa",
    *,
    layers: int | None = None,
    block: int = 7,
    taps: tuple[int, ...] | None = None,
    stream: Stream = "attn_res",
    causal: bool = False,
    ffn: int | None = None,
    markov_rank: int | None = None,
    mask_id: int | None = None,
    theta: float = 50_000.0,
    **attention: int,
) -> DraftSpec:
    """The draft that these sizes describe; what is not given follows from the target.

    Args:
      backbone: grouped queries or latent attention.
      layers: five, or two for a target of fewer than 12 layers.
      block: tokens drafted in a step.
      taps: tapped layers counted from 0; spread evenly from the second to the last but one where omitted.
      causal: whether a drafted position sees only the block up to itself.
      mask_id: the last but two of the vocabulary, which the tokenizer does not use, where omitted.
      attention: sizes of the backbone by the names of ``GqaSizes`` or ``MlaSizes``.

    Raises:
      TrainingError: everything that does not fit, at once.
    """
    keys, published = (GQA_KEYS, PUBLISHED["k3.1-gqa"]) if backbone == "gqa" else (MLA_KEYS, PUBLISHED["k3-mla"])
    large = target.hidden == PUBLISHED_HIDDEN
    given = {key: value for key, value in attention.items() if value is not None}
    problems = [
        f"{key} is no size of the backbone {backbone}; it has {', '.join(keys)}" for key in given if key not in keys
    ]
    made = vars(published.attention) if large else _scaled(target.hidden, backbone)
    sizes = {**made, **{key: value for key, value in given.items() if key in keys}}
    config = DraftConfig(
        "",
        GqaSizes(**sizes) if backbone == "gqa" else MlaSizes(**sizes),
        markov_rank=markov_rank or (published.markov_rank if large else min(256, target.hidden)),
        hidden=target.hidden,
        vocab=target.vocab,
        layers=layers or (5 if target.layers >= 12 else 2),
        ffn=ffn or 2 * target.hidden,
        block=block,
        sees="past" if causal else "block",
        confidence="hidden and token",
    )
    taps = _spread(target.layers) if taps is None else tuple(taps)
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.layers:
        problems.append(f"taps = {list(taps)}; they are layers from 0 to {target.layers - 1} in ascending order")
    config = replace(config, taps=max(len(taps), 1))
    mask_id = target.vocab - 3 if mask_id is None else mask_id
    counts = {**sizes, "markov_rank": config.markov_rank, "layers": config.layers, "ffn": config.ffn}
    problems += [f"{name} = {value}; it must be 1 or more" for name, value in counts.items() if value < 1]
    if not 1 <= block <= 15:
        problems.append(f"block = {block}; it must be from 1 to 15")
    if not 0 <= mask_id < target.vocab:
        problems.append(f"mask_id = {mask_id}; it must be an id from 0 to {target.vocab - 1}")
    if backbone == "gqa" and sizes["kv_heads"] > 0 and sizes["heads"] % sizes["kv_heads"]:
        problems.append(f"heads = {sizes['heads']} is no multiple of kv_heads = {sizes['kv_heads']}")
    turned = "head_dim" if backbone == "gqa" else "rope_dim"
    if sizes[turned] % 2:
        problems.append(f"{turned} = {sizes[turned]}; rotated channels come in pairs")
    if problems:
        raise TrainingError(f"No such draft of {target.name} can be made", problems)
    return DraftSpec(config, taps, stream, RopeConfig(theta), mask_id, confidence=(True, True))


def first_weights(spec: DraftSpec, target: Mapping[str, Any], precision: Precision, seed: int) -> dict[str, Array]:
    """Float32 masters by checkpoint name: small random matrices, a Markov bias and a confidence of nothing yet.

    The last norm begins as the target's own, since the target's head reads behind it.
    """
    last = "norm.weight" if isinstance(spec.sizes.attention, GqaSizes) else "final_norm.weight"
    random = np.random.default_rng([seed, 2])
    deep = np.sqrt(2 * spec.sizes.layers)
    made = {}
    for name, held in draft_parameters(spec.sizes, precision).items():
        noise = random.standard_normal(held.shape, np.float32)
        if name == last:
            values = np.asarray(target["model.norm.weight"]).astype(np.float32)
        elif len(held.shape) == 1 and name.endswith("norm.weight"):
            values = np.ones(held.shape, np.float32)
        elif name.startswith("confidence_head") or name == "markov_head.markov_w2.weight":
            values = np.zeros(held.shape, np.float32)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values = noise / np.float32(np.sqrt(held.shape[-1]) * deep)
        else:
            values = noise / np.float32(np.sqrt(held.shape[-1]))
        made[name] = jnp.asarray(values)
    return made


def _scaled(hidden: int, backbone: Backbone) -> dict[str, int]:
    heads = max(hidden // 32, 2) // 2 * 2
    if backbone == "gqa":
        return dict(zip(GQA_KEYS, (heads, heads // 2, 32), strict=True))
    return dict(zip(MLA_KEYS, (heads, max(hidden // 2, 8), max(hidden // 4, 8), 32, 16, 32), strict=True))


def _spread(layers: int) -> tuple[int, ...]:
    first, last = min(1, layers - 1), max(layers - 2, 0)
    return tuple(sorted({round(float(place)) for place in np.linspace(first, last, min(TAPS, layers))}))
