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


@pytest.mark.parametrize(
    ("data", "parameters"),
    [(KIMI, 49_122_675_072), (QWEN3_NEXT, 79_674_391_296), (QWEN3_5, 752_393_024)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_count_is_exact(data: dict[str, Any], parameters: int) -> None:
    read = to_stack(data)
    lm = zoo.load(read.stack, device="meta")
    assert sum(parameter.numel() for parameter in lm.parameters()) == parameters
    back = to_config(lm.config, read.family.model_type)
    assert back.stack == read.stack
    assert back.kinds == read.kinds


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
