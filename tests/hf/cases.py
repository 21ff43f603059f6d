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
}
FIRST = {case["model_type"]: name for name, case in reversed(CASES.items())}.values()
"""One case of every family, for what is asked of a family once."""
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
