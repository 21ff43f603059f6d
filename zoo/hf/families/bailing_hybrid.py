"""Ling-3.0: KDA with a bounded, full-rank decay, and latent attention with a gate a head (2026)."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._kda import Decay, kda, kda_tensors
from zoo.hf.families._latent import LatentRope, LogitScale, latent_attention, latent_tensors
from zoo.hf.families._llama import DENSE, NORMS
from zoo.hf.families._mixture import (
    Shared,
    expert_tensors,
    is_dense,
    mixture,
    mlp_layer_types,
    shared_tensors,
    sigmoid_router,
    write_dense,
)
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes, WithFFN, with_ffns
from zoo.hf.tensors import rule


def _layer_types(config: Config) -> list[str]:
    size = config["layer_group_size"]
    return [
        "linear_attention" if (layer + 1) % size else "full_attention" for layer in range(config["num_hidden_layers"])
    ]


def _prepare(data: dict[str, Any]) -> dict[str, Any]:
    """Without keys that only say again what others say. Beside `rope_parameters` transformers writes the theta that it
    has not read."""
    shared = data.get("num_shared_experts") or data.get("n_shared_experts") or 1
    shared *= data.get("moe_intermediate_size") or 768
    again = {"rotary_dim": data.get("qk_rope_head_dim", 64), "moe_shared_expert_intermediate_size": shared}
    if data.get("rope_parameters"):
        again["rope_theta"] = data.get("rope_theta")
    return {key: value for key, value in data.items() if key not in again or value != again[key]}


_KDA = Kind(
    {"mixer": kda(Decay("kda_lower_bound", "full", "kda_safe_gate"))}, [*kda_tensors("attention.", "dense"), *NORMS]
)
_MIXER = latent_attention(rope=LatentRope(theta=6e6), logit_scale=LogitScale())
_MIXER["gates"]["output"] = {"name": "sigmoid", "options": {"granularity": "headwise", "rank": "full"}}
_MLA = Kind(
    {"mixer": _MIXER},
    [
        *latent_tensors("attention.", "dense"),
        rule("attention.g_proj.weight", "mixer.gates.output.g_proj.weight"),
        *NORMS,
    ],
)
_ROUTER = sigmoid_router(renormalize="moe_renormalize", groups="num_expert_group", top_groups="topk_group")
_MOE = Kind(
    {
        "ffn": mixture(
            n_experts="num_experts", top_k="num_experts_per_token", router=_ROUTER, shared=Shared("num_shared_experts")
        )
    },
    [
        rule("mlp.gate.weight", "ffn.router.proj.weight"),
        rule("mlp.gate.expert_bias", "ffn.router.selection_bias"),
        *expert_tensors("mlp.experts"),
        *shared_tensors("mlp.shared_experts"),
    ],
)
# `head_dim`, `layer_group_size` and the like are read where what they stand for is not there
_HARMLESS = frozenset(
    (
        "first_k_dense_replace",
        "head_dim",
        "layer_group_size",
        "model_max_length",
        "mtp_loss_scaling_factor",
        "num_nextn_predict_layers",
        "qk_head_dim",
        "rope_theta",
        "short_conv_kernel_size",
    )
)

FAMILY = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    defaults={
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "num_expert_group": 8,
        "topk_group": 4,
        "num_experts_per_token": 8,
        "first_k_dense_replace": 2,
        "moe_renormalize": True,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "num_experts": 512,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "layer_types": _layer_types,
        "mlp_layer_types": mlp_layer_types,
        # transformers writes these beside their originals, of which `head_dim` has then become another
        "linear_head_dim": lambda config: config["head_dim"],
        "linear_num_heads": lambda config: config["num_attention_heads"],
        "linear_conv_kernel_dim": lambda config: config["short_conv_kernel_size"],
    },
    tensors=(
        rule("model.word_embeddings.weight", "embed.weight"),
        rule("model.norm.weight", "norm.weight"),
        rule("lm_head.weight", "head.weight"),
    ),
    fixed={
        "attention_bias": (False,),
        "gated_attention_proj_granularity_type": ("head_wise", "headwise"),
        "group_norm_size": (1,),
        "moe_router_enable_expert_bias": (True,),
        "no_kda_lora": (True,),
        "rope_interleave": (True,),
        "score_function": ("sigmoid",),
    },
    harmless=_HARMLESS,
    aliases={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    prepare=_prepare,
    own_head=True,
    skipped=(r"model\.layers\.{n}\..*",),
    layers=WithFFN(LayerTypes({"linear_attention": "kda", "full_attention": "mla"}), is_dense, write_dense),
    kinds=with_ffns({"kda": _KDA, "mla": _MLA}, _MOE, DENSE),
)
