"""Small Kimi-K3 and K3.1 Pro configurations in the released form; every size can be changed by name."""

from collections.abc import Mapping
from typing import Any

from kimi_jax.config_keys import VISION_FIXED
from kimi_jax.problems import ProblemsError

TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "full_attention": (4, 8, 9),
    "attn_res_block_size": 4,
    "intermediate_size": 256,
    "kda_heads": 8,
    "kda_head_dim": 32,
    "num_attention_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "routed_expert_hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_shared_experts": 2,
    "max_position_embeddings": 8192,
}
"""About 5 M parameters; every shipped layout divides it."""

MID: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 17,
    "full_attention": (4, 8, 12, 16, 17),
    "attn_res_block_size": 4,
    "intermediate_size": 2048,
    "kda_heads": 8,
    "kda_head_dim": 128,
    "num_attention_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 64,
    "num_experts_per_token": 8,
    "routed_expert_hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_shared_experts": 2,
    "max_position_embeddings": 32768,
}
"""The benchmark's mid size: about 280 M parameters, 265 MB."""

BIG: dict[str, Any] = {
    **MID,
    "hidden_size": 768,
    "num_hidden_layers": 25,
    "full_attention": (4, 8, 12, 16, 20, 24, 25),
    "num_experts": 120,
    "routed_expert_hidden_size": 384,
    "moe_intermediate_size": 384,
}
"""The benchmark's big size: about 1.4 B parameters, 1.0 GB."""

VISION: dict[str, Any] = {
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 10,
    "init_pos_emb_time": 4,
    "mm_hidden_size": 48,
    "patch_size": 14,
    "qkv_hidden_size": 96,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
}
"""A tower and projector that go with any text model: about 0.2 M parameters."""

INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
"""An indexer that goes with any text model: a page of text chooses."""

SIZES = {"tiny": TINY, "mid": MID, "big": BIG}


def config_json(size: str = "tiny", **changes: Any) -> dict[str, Any]:
    """A config.json in the released nesting.

    Args:
      size: ``tiny``, ``mid`` or ``big``.
      changes: sizes to replace, by the keys of ``TINY``.

    Raises:
      ProblemsError: an unknown size or key.
    """
    if size not in SIZES or changes.keys() - TINY.keys():
        problems = [f"no size called {size!r}"] if size not in SIZES else []
        problems += [f"no such key: {key}" for key in sorted(changes.keys() - TINY.keys())]
        raise ProblemsError(
            "No such test configuration", problems, f"Sizes: {', '.join(SIZES)}. Keys: {', '.join(TINY)}."
        )
    values = {**SIZES[size], **changes}
    layers, vocab = values["num_hidden_layers"], values["vocab_size"]
    full = sorted(values.pop("full_attention"))
    heads, head_dim = values.pop("kda_heads"), values.pop("kda_head_dim")
    reserved = vocab - 256 if vocab >= 512 else 0
    ids = {"bos_token_id": reserved, "eos_token_id": reserved + 2, "pad_token_id": vocab - 1}
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "gate_lower_bound": -5.0,
            "head_dim": head_dim,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_key_value_heads": values["num_attention_heads"],
        "num_nextn_predict_layers": 0,
        "quantization_config": _mxfp4(),
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        **ids,
        **values,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "media_placeholder_token_id": reserved + 21,
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }


def with_vision(config: Mapping[str, Any], **changes: int) -> dict[str, Any]:
    """The same config.json with a tower whose rows fit its text model.

    Args:
      config: as :func:`config_json` gives it.
      changes: sizes to replace, by the keys of ``VISION``.
    """
    fixed = {key: values[0] for key, values in VISION_FIXED.items()}
    width = {"text_hidden_size": config["text_config"]["hidden_size"]}
    return {**config, "vision_config": {**fixed, **VISION, **width, **changes}}


def with_indexer(config: Mapping[str, Any], **changes: int) -> dict[str, Any]:
    """The same config.json as a K3.1 Pro one: every full-attention layer has an indexer.

    Args:
      config: as :func:`config_json` gives it.
      changes: sizes to replace, by the keys of ``INDEXER``.
    """
    layers = config["text_config"]["linear_attn_config"]["full_attn_layers"]
    text = {**config["text_config"], "dsa_config": {**INDEXER, **changes, "dsa_layers": layers}}
    kind = {"architectures": ["KimiK31ForConditionalGeneration"], "model_type": "kimi_k31"}
    return {**config, **kind, "text_config": text}


def preprocessor_json(**changes: Any) -> dict[str, Any]:
    """A preprocessor_config.json with the released values, or others by the keys of its ``media_proc_cfg``."""
    section = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 65_536,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    }
    return {"media_proc_cfg": {**section, **changes}}


def _mxfp4() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
