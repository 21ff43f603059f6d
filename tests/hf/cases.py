"""Tiny models of every family, one row or more each: name -> the arguments of its configuration.

Sizes differ wherever they may, so that no two swapped axes fit together.
"""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_attention_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
QWEN = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
QWEN_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
}
KIMI = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-4,
    **MLA,
}
V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe"],
    "intermediate_size": 14,
    "num_attention_heads": 6,
    "head_dim": 20,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 14,
    "o_groups": 3,
    "o_lora_rank": 10,
    "index_n_heads": 9,
    "index_head_dim": 12,
    "index_topk": 5,
    "sliding_window": 11,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "compress_rope_theta": 7000.0,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "hc_mult": 3,
    "swiglu_limit": 1.1,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-4,
}
GLM = {
    "model_type": "glm5_next_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "index_n_heads": 9,
    "index_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 10,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 1.1,
    "rms_norm_eps": 1e-4,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_parameters": ROPE,
    },
    "llama_yarn": {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": ROPE,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": ROPE,
    },
    "qwen3_next_dense": {"model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2], **QWEN},
    "qwen3_next": {"model_type": "qwen3_next", "mlp_only_layers": [1], **QWEN, **QWEN_MOE},
    "qwen3_next_not_renormalised": {"model_type": "qwen3_next", "norm_topk_prob": False, **QWEN, **QWEN_MOE},
    "qwen3_5": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **QWEN},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **QWEN, **QWEN_MOE},
    "kimi_linear_dense": {**KIMI, "mlp_layer_types": ["dense"] * 4},
    "kimi_linear": {
        **KIMI,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        **MLA,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layer_group_size": 3,
        "first_k_dense_replace": 1,
        "head_dim": 10,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 14,
        "n_shared_experts": 2,
        "q_lora_rank": 10,
        "kda_lower_bound": -4.0,
        "routed_scaling_factor": 1.7,
        "rope_parameters": ROPE,
        "rms_norm_eps": 1e-4,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 1.1,
        # so short that its slow pairs slow down within the test, and ends that are no whole pairs
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 4.0,
            "beta_slow": 0.7,
            "truncate": False,
        },
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **MLA,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 4.0,
            "beta_slow": 0.7,
            "mscale": 0.8,
            "mscale_all_dim": 0.9,
        },
    },
    "deepseek_v3_plain": {
        "model_type": "deepseek_v3",
        **MLA,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "tie_word_embeddings": True,
        "n_routed_experts": 5,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "n_shared_experts": 1,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 5,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "minimax": {
        "model_type": "minimax",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 5,
        "block_size": 16,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.9,
        "linear_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.8,
        "mlp_alpha_factor": 1.4,
        "mlp_beta_factor": 0.7,
        "rope_parameters": ROPE,
    },
    "deepseek_v4": {
        **V4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 4.0,
            "beta_slow": 0.7,
        },
    },
    "deepseek_v4_sigmoid": {**V4, "scoring_func": "sigmoid", "mlp_layer_types": ["moe"] * 3, "hc_sinkhorn_iters": 3},
    "glm5_next": {
        **GLM,
        "index_kpool": 4,
        "index_topk": 20,
        "n_group": 2,
        "linear_lower_bound": -4.0,
    },
    "glm5_next_unbounded": {
        **GLM,
        "index_kpool": 1,
        "index_topk": 18,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "linear_lower_bound": None,
    },
}
FIRST = {case["model_type"]: name for name, case in reversed(CASES.items())}.values()
"""One case of every family, for what is asked of a family once."""
# fla's own classes: without fusions, which are kernels
PLAIN = {"fuse_swiglu": False, "fuse_cross_entropy": False, "num_hidden_layers": 2, "norm_eps": 1e-4}
FLA_CASES: dict[str, dict[str, Any]] = {
    "fla_gated_deltanet": {
        "model_type": "gated_deltanet",
        **PLAIN,
        "fuse_norm": False,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.5,
        "conv_size": 3,
        "output_gate_activation": "sigmoid",
    },
    "fla_kda": {"model_type": "kda", **PLAIN, "fuse_norm": False, "num_heads": 2, "head_dim": 8, "expand_v": 1.5},
    "fla_kda_bounded": {
        "model_type": "kda",
        **PLAIN,
        "fuse_norm": False,
        "num_heads": 3,
        "head_dim": 8,
        "safe_gate": True,
        "lower_bound": -4.0,
    },
    "fla_gla": {"model_type": "gla", **PLAIN, "num_heads": 2, "expand_v": 1.5},
    "fla_retnet": {"model_type": "retnet", **PLAIN, "num_heads": 4},
    "fla_mamba2": {
        "model_type": "mamba2",
        "fuse_cross_entropy": False,
        "num_hidden_layers": 2,
        "norm_eps": 1e-4,
        "fuse_norm": False,
        "head_dim": 8,
        "state_size": 6,
        "expand": 3,
        "conv_kernel": 3,  # with several groups fla's own prefill and decoding differ without its kernels
    },
}
DERIVED = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Tensors of MiniMax's files that transformers makes of the configuration whether they are there or not."""
BATCH, LENGTH, PREFILL = 2, 70, 63


def another(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [*value[1:], value[0]] if len(set(map(str, value))) > 1 else [*value, *value, 1]
    if isinstance(value, dict):
        return {**value, "factor": 3.0}
    return 3
