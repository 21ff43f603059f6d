"""What the Llama-shaped families share: names of attention, norms and the dense FFN."""

from __future__ import annotations

from typing import Any

from zoo.hf.family import Kind
from zoo.hf.rope import RopeKeys
from zoo.hf.template import Key
from zoo.hf.tensors import Rule, rule, same

NORMS: tuple[Rule, ...] = (
    rule("input_layernorm.weight", "mixer_residual.norm.weight"),
    rule("post_attention_layernorm.weight", "ffn_residual.norm.weight"),
)

DENSE = Kind(
    {"ffn": {"name": "swiglu", "options": {"width": Key("intermediate_size")}}},
    same("mlp.", "ffn.", "gate_proj.weight up_proj.weight down_proj.weight"),
)

ATTENTION: tuple[Rule, ...] = (
    *same("self_attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"),
    *same("self_attn.", "mixer.", "q_proj.bias k_proj.bias v_proj.bias o_proj.bias"),
    *same("self_attn.", "mixer.", "q_norm.weight k_norm.weight"),
)


def attention(**options: Any) -> dict[str, Any]:
    """Attention with the heads and the rotation that every family has, and its own options."""
    heads = {
        "n_heads": Key("num_attention_heads"),
        "n_kv_heads": Key("num_key_value_heads"),
        "head_dim": Key("head_dim"),
    }
    return {"name": "attention", "options": {**heads, "rope": RopeKeys(), "window": None, **options}, "gates": {}}


def head_dim(config: Any) -> int:
    """What transformers takes where the configuration has none."""
    return int(config["hidden_size"] // config["num_attention_heads"])
