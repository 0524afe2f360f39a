"""Which keys of a config.json matter, which must hold one value, and which change nothing.

Source: the released Kimi-K3 config.json; a key that is on no list here is refused by name, because it could change the
mathematics.
"""

from typing import Any

ARCHITECTURES = {"KimiK3ForConditionalGeneration": False, "KimiK31ForConditionalGeneration": True}
"""Architecture string -> whether it carries a sparse indexer (``dsa_config``)."""

MODEL_TYPES = ("kimi_k3", "kimi_k31")

TOP_READ = (
    "architectures",
    "bos_token_id",
    "dsa_config",
    "eos_token_id",
    "media_placeholder_token_id",
    "model_type",
    "pad_token_id",
    "quantization_config",
    "text_config",
    "tie_word_embeddings",
    "vision_config",
)

TOP_INERT = (
    "auto_map",
    "dtype",
    "ignore_index",
    "image_placeholder",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

TEXT_POSITIVE = (
    "attn_res_block_size",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_token",
    "num_hidden_layers",
    "num_shared_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "routed_expert_hidden_size",
    "v_head_dim",
    "vocab_size",
)
"""Keys of text_config that hold one positive integer."""

TEXT_READ = (
    *TEXT_POSITIVE,
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "bos_token_id",
    "dsa_config",
    "eos_token_id",
    "first_k_dense_replace",
    "linear_attn_config",
    "moe_renormalize",
    "num_key_value_heads",
    "pad_token_id",
    "quantization_config",
    "rms_norm_eps",
    "routed_scaling_factor",
    "tie_word_embeddings",
)

TEXT_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_cross_attention": ((False,), "cross attention is not part of this family"),
    "chunk_size_feed_forward": ((0,), "feed-forward chunking is decided by the engine"),
    "cross_attention_hidden_size": ((None,), "cross attention is not part of this family"),
    "hidden_act": (("situ",), "the only gated unit of the family is situ"),
    "is_decoder": ((False, True), ""),
    "is_encoder_decoder": ((False,), "only decoders are built"),
    "latent_moe_use_norm": ((True,), "a latent MoE without its norm is not built"),
    "mla_use_nope": ((True,), "rotary positions in latent attention are not built"),
    "mla_use_output_gate": ((True,), "latent attention without its output gate is not built"),
    "moe_layer_freq": ((1,), "every layer after the dense prefix is a mixture of experts"),
    "moe_router_activation_func": (("sigmoid",), "only the sigmoid router is built"),
    "num_expert_group": ((1,), "grouped routing over more than one group is not built"),
    "num_nextn_predict_layers": ((0,), "bundled multi-token heads are not built; a draft is a separate checkpoint"),
    "pruned_heads": (({}, None), "pruned heads are not built"),
    "rope_scaling": ((None,), "there are no rotary positions to scale"),
    "topk_group": ((1,), "grouped routing over more than one group is not built"),
    "topk_method": (("noaux_tc",), "only bias-corrected top-k routing is built"),
    "use_grouped_topk": ((True, False), ""),
}
"""Key -> (values that are built, why another is not). A missing key means the first value."""

TEXT_PRESENT = ("hidden_act", "latent_moe_use_norm", "mla_use_nope", "mla_use_output_gate")
"""The ones of those whose absence means something else to the official code: silu, rotation, no norm, no gate."""

TEXT_INERT = (
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",  # invented by some config classes (7168 // 96); no layer reads it
    "id2label",
    "initializer_range",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "rope_theta",  # invented by some config classes; the text model has no rotation
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
)

LINEAR_ATTENTION = (
    "full_attn_layers",
    "gate_lower_bound",
    "head_dim",
    "kda_layers",
    "num_heads",
    "short_conv_kernel_size",
    "use_full_rank_gate",
)

LINEAR_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_full_rank_gate": ((True,), "the low-rank output gate of older models is not built"),
}

INDEXER_ALIASES: dict[str, tuple[str, ...]] = {
    "heads": ("index_n_heads", "n_heads", "num_heads", "head_count"),
    "head_dim": ("index_head_dim", "head_dim", "key_length"),
    "top_k": ("index_topk", "topk", "top_k"),
    "layers": ("dsa_layers", "layers", "full_attn_layers"),
}
"""Field of IndexerConfig -> spellings seen in public for ``dsa_config``; the first is the assumed one."""

QUANTIZATION_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "format": (("mxfp4-pack-quantized",), "routed experts are read in their released form"),
    "kv_cache_scheme": ((None,), "cache scales from a checkpoint are not built"),
    "quant_method": (("compressed-tensors",), ""),
    "sparsity_config": (({}, None), "sparse weights are not built"),
    "transform_config": (({}, None), "transformed weights are not built"),
}

QUANTIZATION_INERT = ("global_compression_ratio", "ignore", "quantization_status", "version")

GROUP_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "format": (("mxfp4-pack-quantized", None), ""),
    "input_activations": ((None,), "quantised activations are not built"),
    "output_activations": ((None,), "quantised activations are not built"),
}

GROUP_INERT = ("targets",)

EXPERT_FORMAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_bits": ((4,), ""),
    "type": (("float",), ""),
    "group_size": ((32,), ""),
    "strategy": (("group",), ""),
    "symmetric": ((True,), ""),
    "dynamic": ((False,), ""),
}
"""What every weight group of ``quantization_config`` must say: MXFP4 with groups of 32."""

EXPERT_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "actorder": ((None,), "reordered columns are not built"),
    "block_structure": ((None,), ""),
    "scale_dtype": (("torch.uint8", None), ""),
    "zp_dtype": ((None,), "zero points are not built"),
}

EXPERT_INERT = ("observer", "observer_kwargs")

VISION_POSITIVE = (
    "init_pos_emb_height",
    "init_pos_emb_time",
    "init_pos_emb_width",
    "mm_hidden_size",
    "patch_size",
    "qkv_hidden_size",
    "text_hidden_size",
    "vt_hidden_size",
    "vt_intermediate_size",
    "vt_num_attention_heads",
    "vt_num_hidden_layers",
)

VISION_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_func": ("gelu_pytorch_tanh",),
    "attn_bias": (False,),
    "linear_bias": (False,),
    "merge_kernel_size": ([2, 2],),
    "merge_type": ("sd2_tpool",),
    "mlp_type": ("mlp2",),
    "mm_projector_type": ("patchmergerv2",),
    "norm_type": ("rmsnorm",),
    "patch_embed_proj_bias": (False,),
    "pos_emb_interpolation_mode": ("bilinear",),
    "pos_emb_type": ("divided_fixed",),
    "projector_hidden_act": ("gelu",),
}

VISION_INERT = ("_attn_implementation", "model_type", "dtype", "torch_dtype")
