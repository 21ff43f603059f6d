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
}
BATCH, LENGTH, PREFILL = 2, 70, 33
