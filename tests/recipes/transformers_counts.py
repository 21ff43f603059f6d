"""How many parameters transformers' models have, layer by layer. A program, since fla must be hidden before
transformers is imported, as for tests/parity/oracle.py.

`python transformers_counts.py FILE` writes {recipe: {embed, layers, rest, total, tied}} as JSON, counted on the meta
device. Configurations are the checkpoints', also where those differ from the classes' defaults.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LINEAR, FULL, INDEXED = "linear_attention", "full_attention", "indexed_attention"
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def qwen3_5(
    d_model: int, n_layers: int, heads: tuple[int, int], v_heads: int, width: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_value_heads": v_heads,
        "intermediate_size": width,
        "tie_word_embeddings": tied,
    }


def qwen3_5_moe(
    d_model: int, n_layers: int, heads: tuple[int, int], v_heads: int, experts: tuple[int, int, int]
) -> dict[str, Any]:
    n_experts, top_k, width = experts
    return {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_value_heads": v_heads,
        "num_experts": n_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next/80b_a3b": {"model_type": "qwen3_next"},
    "qwen3_5/0_8b": qwen3_5(1024, 24, (8, 2), 16, 3584, tied=True),
    "qwen3_5/2b": qwen3_5(2048, 24, (8, 2), 16, 6144, tied=True),
    "qwen3_5/4b": qwen3_5(2560, 32, (16, 4), 32, 9216, tied=True),
    "qwen3_5/9b": qwen3_5(4096, 32, (16, 4), 32, 12288),
    "qwen3_5/27b": qwen3_5(5120, 64, (24, 4), 48, 17408),
    "qwen3_5/35b_a3b": qwen3_5_moe(2048, 40, (16, 2), 32, (256, 8, 512)),
    "qwen3_5/122b_a10b": qwen3_5_moe(3072, 48, (32, 2), 64, (256, 8, 1024)),
    "qwen3_5/397b_a17b": qwen3_5_moe(4096, 60, (32, 2), 64, (512, 10, 1024)),
    # without a pattern transformers has full attention at 4, 8, 12, ..., counted from 0; the checkpoint counts from 1
    "kimi_linear/48b_a3b": {
        "model_type": "kimi_linear",
        "layer_types": [FULL if layer in (3, 7, 11, 15, 19, 23, 26) else LINEAR for layer in range(27)],
    },
    "ling3/flash": {"model_type": "bailing_hybrid", "num_mtp_layers": 0},
    "olmo_hybrid/7b": {"model_type": "olmo_hybrid"},
    # the class's defaults are another model's
    "minimax/text_01": {
        "model_type": "minimax",
        "vocab_size": 200064,
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 32,
        "layer_types": [FULL if layer % 8 == 7 else LINEAR for layer in range(80)],
    },
    "gpt_oss/20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt_oss/120b": {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
    # the default layer types fit neither checkpoint
    "deepseek_v4/flash": {
        "model_type": "deepseek_v4",
        "layer_types": [SLIDING, SLIDING, *(HCA if layer % 2 else CSA for layer in range(2, 43))],
    },
    "deepseek_v4/pro": {
        "model_type": "deepseek_v4",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "layer_types": [HCA, HCA, *(HCA if layer % 2 else CSA for layer in range(2, 61))],
    },
    "glm5_next/flash": {"model_type": "glm5_next_text", "index_kpool": 4},
}


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    with open(file, "w") as out:
        json.dump({recipe: counts(dict(config)) for recipe, config in CONFIGS.items()}, out)


def counts(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    glm = made.model_type == "glm5_next_text"  # the one without a class of its own with a head
    with torch.device("meta"):
        model = (transformers.AutoModel if glm else transformers.AutoModelForCausalLM).from_config(made)
    body = model if glm else model.model

    def size(module: Any) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    layers = [size(layer) for layer in body.layers]
    return {
        "embed": size(body.embed_tokens),
        "layers": layers,
        "total": size(model),
        "rest": size(body) - size(body.embed_tokens) - sum(layers),
        "tied": bool(made.tie_word_embeddings),
    }


if __name__ == "__main__":
    main(sys.argv[1])
