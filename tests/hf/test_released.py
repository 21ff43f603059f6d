"""Configurations as the released checkpoints have them: every key understood, and the number of parameters is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.hf.folders import QWEN3_NEXT as TINY
from tests.hf.folders import logits, write
from zoo.hf import import_folder
from zoo.hf.bound import bind_model
from zoo.hf.recipes import to_config, to_stack
from zoo.registry import RecipeError

KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "vision_config": {"depth": 12},
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
}


QWEN3_5_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "vision_config": {"depth": 27},
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}

LING3: dict[str, Any] = {
    "first_k_dense_replace": 2,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 768,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 768,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 157184,
}

GPT_OSS: dict[str, Any] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

LLAMA3_1: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("data", "parameters"),
    [
        (KIMI, 49_122_675_072),
        (QWEN3_NEXT, 79_674_391_296),
        (QWEN3_5, 752_393_024),
        (QWEN3_5_27B, 26_895_998_464),
        (LING3, 124_414_191_072),
        (GPT_OSS, 20_914_757_184),
        (LLAMA3_1, 8_030_261_248),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_count_is_exact(data: dict[str, Any], parameters: int) -> None:
    read = to_stack(data)
    lm = zoo.load(read.stack, device="meta")
    assert sum(parameter.numel() for parameter in lm.parameters()) == parameters
    back = to_config(lm.config, read.family.model_type)
    assert back.stack == read.stack
    assert back.kinds == read.kinds


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (LING3, "rotary_dim", 32),
        (LING3, "moe_shared_expert_intermediate_size", 384),
        (LING3, "no_kda_lora", False),
        (GPT_OSS, "experts_per_token", 2),
        (QWEN3_5_27B["text_config"], "attn_output_gate", False),
        (QWEN3_NEXT, "use_sliding_window", True),
    ],
)
def test_a_key_that_says_what_others_say_says_nothing_else(data: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=key):
        to_stack({**data, key: value})


@pytest.mark.parametrize("said", [{}, {"rope_parameters": None}, {"rope_scaling": None, "rope_theta": 150000.0}])
def test_gpt_oss_has_its_yarn_where_nothing_is_said(said: dict[str, Any]) -> None:
    plain = {key: value for key, value in GPT_OSS.items() if not key.startswith("rope_")}
    assert to_stack({**plain, **said}).stack == to_stack(GPT_OSS).stack


def test_rope_said_twice_for_deepseek_v4() -> None:
    said = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(RecipeError, match="rope_scaling and rope_parameters are both there"):
        to_stack({**said, "rope_parameters": {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1.6e5}}})


def test_the_layers_of_kimi_linear() -> None:
    """Seven of 27 are full attention, the last among them: the checkpoint's layout, not transformers' default."""
    read = to_stack(KIMI)
    assert [layer for layer, kind in enumerate(read.kinds, 1) if kind.startswith("mla")] == [4, 8, 12, 16, 20, 24, 27]
    assert read.kinds[0] == "kda_dense"
    assert len(read.stack["first"]) + len(read.stack["pattern"]) + len(read.stack["last"]) <= 7
    names = [rule.hf for rule in bind_model(read.family, read.config, read.kinds, zoo.load(read.stack, device="meta"))]
    assert len(set(names)) == len(names)


def test_the_text_model_of_one_that_sees(tmp_path: Path) -> None:
    """Its names lie deeper, its configuration within; the eyes and the extra prediction are left out, and told."""
    text = {key: value for key, value in TINY.items() if not key.startswith(("moe_", "mlp_", "num_exp", "shared_"))}
    text["model_type"] = "qwen3_5_text"
    folder = write(tmp_path / "hf", text)
    want = logits(zoo.from_hf(folder))
    path = folder / "model.safetensors"
    deeper = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(path).items()}
    beside = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 2)}
    save_file({**deeper, **beside}, path, metadata={"format": "pt"})
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    imported = import_folder(folder)
    assert torch.equal(logits(imported.lm), want)
    assert sorted(imported.skipped) == sorted(beside)
    (folder / "config.json").write_text(json.dumps({**config, "something": 1}))
    with pytest.raises(RecipeError, match="something is 1, which zoo does not understand"):
        import_folder(folder)
