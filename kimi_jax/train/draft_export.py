"""A trained draft in the published layout: config.json, and safetensors under the names of its family.

Source: DSpark notes, sections 3 and 4.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
from kimi_jax.draft.config import GqaSizes
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.rope import RopeConfig
from kimi_jax.precision import BFLOAT16, FLOAT32

STORED = {"bfloat16": ("BF16", BFLOAT16), "float32": ("F32", FLOAT32)}
"""Forms of the exported tensors: the published one, and one that keeps every bit of the masters."""


def export_draft(
    folder: Path, spec: DraftSpec, masters: Mapping[str, Array | np.ndarray[Any, Any]], dtype: str = "bfloat16"
) -> Path:
    """Writes a draft that ``draft.load`` reads back to the same values, rounded to ``dtype``.

    Args:
      folder: made where missing; must not hold a checkpoint yet.
      masters: parameters by checkpoint name.
      dtype: a key of ``STORED``.

    Raises:
      CheckpointError: it cannot be written.
    """
    stored, form = STORED[dtype]
    sources = {
        name: TensorSource(stored, tuple(array.shape), partial(_cast, array, form)) for name, array in masters.items()
    }
    write_checkpoint(folder, sources)
    partial_file = folder / ".config.json.partial"
    partial_file.write_text(json.dumps(config_json(spec, dtype), indent=2) + "\n", encoding="utf-8")
    os.replace(partial_file, folder / "config.json")
    return folder


def config_json(spec: DraftSpec, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json from which ``draft.config_read`` reads this draft again."""
    sizes, attention = spec.sizes, spec.sizes.attention
    values: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "num_attention_heads": attention.heads,
        "target_layer_ids": list(spec.taps),
        "num_target_layers": len(spec.taps),
        "target_hidden_size": sizes.hidden,
        "aux_hidden_stream": spec.stream,
        "mask_token_id": spec.mask_id,
        "block_size": sizes.block,
        "is_causal": sizes.sees == "past",
        "sample_from_anchor": True,
        "markov_rank": sizes.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": sizes.confidence != "none",
        "confidence_head_with_markov": sizes.confidence == "hidden and token",
        "logit_scale": spec.logit_scale,
        "dtype": dtype,
        **_rope(spec.rope),
    }
    if spec.top_k:
        values["dspark_draft_topk"] = spec.top_k
    if isinstance(attention, GqaSizes):
        family = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
        return {**family, **values, "num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        **values,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.yarn is None:
        return {"rope_theta": rope.theta}
    yarn = rope.yarn
    inside = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    optional = {key: getattr(yarn, key) for key in ("mscale", "mscale_all_dim", "attention_factor")}
    inside |= {key: value for key, value in optional.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_parameters": inside}


def _cast(array: Any, form: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.asarray(array).astype(form)
