"""What Qwen3-Next and Qwen3.5 share: Gated DeltaNet, gated attention, the mixture of experts."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._llama import ATTENTION, NORMS, attention
from zoo.hf.family import STACK, Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.rope import RopeKeys
from zoo.hf.template import Key
from zoo.hf.tensors import Piece, Rule, rule, same
from zoo.hf.transforms import Cat, Chain, Grouped, Unsqueezed

ZERO_CENTERED = {**STACK, "norm": {"eps": Key("rms_norm_eps"), "zero_centered": True}}

LAYERS = LayerTypes({"linear_attention": "gdn", "full_attention": "attn"})


def _layer_types(config: Config) -> list[str]:
    every = config["full_attention_interval"]
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["linear_attention" if layer % every else "full_attention" for layer in layers]


DEFAULTS: dict[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": _layer_types,
}

GDN_BLOCK: dict[str, Any] = {
    "name": "gated_deltanet",
    "options": {
        "n_heads": Key("linear_num_key_heads"),
        "n_v_heads": Key("linear_num_value_heads"),
        "head_dim": Key("linear_key_head_dim"),
        "head_v_dim": Key("linear_value_head_dim"),
        "conv_size": Key("linear_conv_kernel_dim"),
    },
    "gates": {"decay": "mamba2", "write": "sigmoid", "output": "silu"},
}

GDN: tuple[Rule, ...] = (
    rule(
        "linear_attn.conv1d.weight",
        ["mixer.q_conv1d.weight", "mixer.k_conv1d.weight", "mixer.v_conv1d.weight"],
        Chain(Cat(), Unsqueezed(1)),
    ),
    *same("linear_attn.", "mixer.gates.decay.", "A_log dt_bias"),
    rule("linear_attn.norm.weight", "mixer.o_norm.weight"),
    rule("linear_attn.out_proj.weight", "mixer.o_proj.weight"),
)

ATTN_BLOCK = attention(
    qk_norm="head", bias=Key("attention_bias"), out_bias=Key("attention_bias"), rope=RopeKeys(fraction=0.25)
) | {"gates": {"output": "sigmoid"}}

# of every head the query first and then its gate
_QUERY = rule(
    "self_attn.q_proj.weight",
    ["mixer.q_proj.weight", "mixer.gates.output.g_proj.weight"],
    Grouped("num_attention_heads"),
)
ATTN: tuple[Rule, ...] = (_QUERY, *(each for each in ATTENTION if not each.hf.startswith("self_attn.q_proj.")))


def moe(renormalize: Any) -> Kind:
    """Softmax top-k with a gated shared expert."""
    block = {
        "name": "moe",
        "options": {
            "n_experts": Key("num_experts"),
            "top_k": Key("num_experts_per_tok"),
            "expert": {"name": "swiglu", "options": {"width": Key("moe_intermediate_size")}},
            "router": {
                "name": "softmax",
                "options": {"renormalize": renormalize, "load_balance": Key("router_aux_loss_coef")},
            },
            "shared": {"name": "swiglu", "options": {"width": Key("shared_expert_intermediate_size")}},
            "shared_gate": True,
        },
    }
    return Kind({"ffn": block}, MOE)


MOE: tuple[Rule, ...] = (
    rule("mlp.gate.weight", "ffn.router.proj.weight"),
    rule("mlp.experts.{e}.gate_proj.weight", Piece("ffn.experts.gate_up_proj", 0, 2)),
    rule("mlp.experts.{e}.up_proj.weight", Piece("ffn.experts.gate_up_proj", 1, 2)),
    rule("mlp.experts.{e}.down_proj.weight", "ffn.experts.down_proj"),
    *same("mlp.shared_expert.", "ffn.shared.", "gate_proj.weight up_proj.weight down_proj.weight"),
    rule("mlp.shared_expert_gate.weight", "ffn.shared_gate.weight"),
)

MOE_DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}


def mixers(gdn: tuple[Rule, ...]) -> dict[str, Kind]:
    """The two kinds of layer without their FFN; `gdn` are the rules of the linear layers' projections."""
    return {
        "gdn": Kind({"mixer": GDN_BLOCK}, (*gdn, *GDN, *NORMS)),
        "attn": Kind({"mixer": ATTN_BLOCK}, (*ATTN, *NORMS)),
    }


SKIPPED = (r"mtp\..*", r"model\.visual\..*")
"""The layer that predicts one token more, and the eyes."""
