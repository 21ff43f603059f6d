"""Small transformers folders, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import zoo
from zoo.hf.recipes import to_stack
from zoo.stack import Stack

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 7,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 61,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "intermediate_size": 24,
    "shared_expert_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


def write(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A folder with that configuration and random weights."""
    torch.manual_seed(0)
    lm = zoo.load(to_stack(config).stack)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    zoo.to_hf(lm.to(dtype), folder)
    edit_config(folder, **config)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Sets tensors by name, or takes them away (None). `__` stands for the dots."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def logits(lm: Stack) -> torch.Tensor:
    tokens = torch.randint(lm.config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return lm(tokens)
