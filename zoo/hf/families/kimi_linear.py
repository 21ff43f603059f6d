"""Kimi-Linear (Kimi team 2025, arXiv:2510.26692): three layers of KDA, one of MLA without positions; 256 experts."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import FILE, REQUIRED, Config
from zoo.hf.families._llama import NORMS
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes, WithFFN, with_ffns
from zoo.hf.template import Derived, Inexpressible, Key, Written
from zoo.hf.tensors import Piece, rule, same
from zoo.hf.transforms import Reshaped, Unsqueezed
from zoo.registry import RecipeError

_KDA = Kind(
    {
        "mixer": {
            "name": "kda",
            "options": {
                "n_heads": Key("linear_num_heads"),
                "head_dim": Key("linear_head_dim"),
                "conv_size": Key("linear_conv_kernel_dim"),
            },
            "gates": {
                "decay": "kda",
                "write": "sigmoid",
                "output": {"name": "sigmoid", "options": {"rank": "head_dim"}},
            },
        }
    },
    (
        *same("self_attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight o_norm.weight"),
        *(rule(f"self_attn.{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed(1)) for x in "qkv"),
        rule("self_attn.b_proj.weight", "mixer.gates.write.b_proj.weight"),
        rule("self_attn.A_log", "mixer.gates.decay.A_log", Reshaped(1, 1, -1, 1)),
        rule("self_attn.dt_bias", "mixer.gates.decay.dt_bias", Reshaped(-1)),
        *(rule(f"self_attn.f_{x}_proj.weight", f"mixer.gates.decay.f_proj.{x}.weight") for x in "ab"),
        *(rule(f"self_attn.g_{x}_proj.weight", f"mixer.gates.output.g_proj.{x}.weight") for x in "ab"),
        *NORMS,
    ),
)

_MLA = Kind(
    {
        "mixer": {
            "name": "mla",
            "options": {
                "n_heads": Key("num_attention_heads", "num_key_value_heads"),
                "kv_lora_rank": Key("kv_lora_rank"),
                "q_lora_rank": Key("q_lora_rank", optional=True),
                "qk_nope_head_dim": Key("qk_nope_head_dim"),
                "qk_rope_head_dim": Key("qk_rope_head_dim"),
                "v_head_dim": Key("v_head_dim"),
                "rope": None,
                "norm": {"eps": 1e-6},  # of the latents' norms, whatever the configuration says
            },
            "gates": {},
        }
    },
    (
        *same("self_attn.", "mixer.", "q_proj.weight q_a_proj.weight q_b_proj.weight kv_b_proj.weight o_proj.weight"),
        rule("self_attn.q_a_layernorm.weight", "mixer.q_a_norm.weight"),
        rule("self_attn.kv_a_proj_with_mqa.weight", "mixer.kv_a_proj.weight"),
        rule("self_attn.kv_a_layernorm.weight", "mixer.kv_a_norm.weight"),
        *NORMS,
    ),
)

_DENSE = Kind(
    {"ffn": {"name": "swiglu", "options": {"width": Key("intermediate_size")}}},
    same("block_sparse_moe.", "ffn.", "gate_proj.weight up_proj.weight down_proj.weight"),
)


def _shared(config: Config) -> int:
    if config["num_shared_experts"] < 1:
        config.refuse("num_shared_experts", f"{config['num_shared_experts']}, and the family has one at least")
    return int(config["moe_intermediate_size"] * config["num_shared_experts"])


def _write_shared(width: Any, out: Written) -> None:
    unit = out.get("moe_intermediate_size")
    if not isinstance(width, int) or not unit or width % unit:
        raise Inexpressible(f"{width}, where the family has a multiple of the experts' width {unit}")
    out.set("num_shared_experts", width // unit)


_ROUTER = {
    "score": "sigmoid",
    "renormalize": Key("moe_renormalize"),
    "scaling": Key("routed_scaling_factor"),
    "n_groups": Key("num_expert_group"),
    "top_groups": Key("topk_group"),
}

_MOE = Kind(
    {
        "ffn": {
            "name": "moe",
            "options": {
                "n_experts": Key("num_experts"),
                "top_k": Key("num_experts_per_token"),
                "expert": {"name": "swiglu", "options": {"width": Key("moe_intermediate_size")}},
                "router": {"name": "sigmoid", "options": _ROUTER},
                "shared": {"name": "swiglu", "options": {"width": Derived(_shared, _write_shared)}},
                "shared_gate": False,
            },
        }
    },
    (
        rule("block_sparse_moe.gate.weight", "ffn.router.proj.weight"),
        rule("block_sparse_moe.gate.e_score_correction_bias", "ffn.router.selection_bias"),
        rule("block_sparse_moe.experts.{e}.w1.weight", Piece("ffn.experts.gate_up_proj", 0, 2)),
        rule("block_sparse_moe.experts.{e}.w3.weight", Piece("ffn.experts.gate_up_proj", 1, 2)),
        rule("block_sparse_moe.experts.{e}.w2.weight", "ffn.experts.down_proj"),
        *same("block_sparse_moe.shared_experts.", "ffn.shared.", "gate_proj.weight up_proj.weight down_proj.weight"),
    ),
)


def _prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's own configuration says the linear layers in a mapping of their own, and counts layers from 1."""
    out = dict(data)
    linear = out.pop("linear_attn_config", None)
    if linear is not None:
        names = {
            "head_dim": "linear_head_dim",
            "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        }
        if not isinstance(linear, dict):
            raise RecipeError(f"{FILE}: linear_attn_config: expected an object, found {linear!r}")
        linear = dict(linear)
        full, kda = linear.pop("full_attn_layers", None), linear.pop("kda_layers", None)
        if full is not None and kda is not None and out.get("layer_types") is None:
            types = {**dict.fromkeys(full, "full_attention"), **dict.fromkeys(kda, "linear_attention")}
            out["layer_types"] = [types.get(layer + 1, "missing") for layer in range(out["num_hidden_layers"])]
        out |= {names.get(key, f"linear_attn_config.{key}"): value for key, value in linear.items()}
    return out


def _layer_types(config: Config) -> list[str]:
    """transformers' default, which is not the checkpoint's."""
    layers = range(config["num_hidden_layers"])
    return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in layers]


def _mlp_layer_types(config: Config) -> list[str]:
    dense = config["first_k_dense_replace"]
    return ["dense" if layer < dense else "sparse" for layer in range(config["num_hidden_layers"])]


def _is_dense(config: Config, layer: int) -> bool:
    types = config["mlp_layer_types"]
    if len(types) != config["num_hidden_layers"] or any(each not in ("dense", "sparse") for each in types):
        config.refuse("mlp_layer_types", f"{types!r}, and zoo knows dense and sparse, one a layer")
        return False
    return bool(types[layer] == "dense")


def _write_dense(dense: list[bool], out: Written) -> None:
    out.set("mlp_layer_types", ["dense" if each else "sparse" for each in dense])


FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    defaults={
        "vocab_size": REQUIRED,
        "hidden_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 8,
        "num_experts": 256,
        "moe_renormalize": True,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "mlp_layer_types": _mlp_layer_types,
        "layer_types": _layer_types,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    layers=WithFFN(LayerTypes({"linear_attention": "kda", "full_attention": "mla"}), _is_dense, _write_dense),
    kinds=with_ffns({"kda": _KDA, "mla": _MLA}, _MOE, _DENSE),
    aliases={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    prepare=_prepare,
    own_head=True,
    fixed={
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": (True,),
        "mla_use_nope": (True,),
        "num_nextn_predict_layers": (0,),
    },
    # nothing is rotated; head_dim and qk_head_dim are what the other widths make them
    harmless=frozenset(("model_max_length", "rope_parameters", "head_dim", "qk_head_dim")),
)
