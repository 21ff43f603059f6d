"""Ling-3.0: KDA with a bounded, full-rank decay, and latent attention with a gate a head (2026)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._latent import LatentRope, LogitScale, latent_attention, latent_tensors
from zoo.hf.families._llama import DENSE, NORMS
from zoo.hf.families._mixture import Shared, expert_tensors, mixture, shared_tensors, sigmoid_router
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes, WithFFN, with_ffns
from zoo.hf.template import Entry, Inexpressible, Key, Written
from zoo.hf.tensors import rule, same
from zoo.hf.transforms import Reshaped, Unsqueezed

THETA = 6e6


class Decay(Entry):
    """Bounded, or with `kda_safe_gate` off KDA's own; of full rank both."""

    def read(self, config: Config) -> Any:
        bound = config["kda_lower_bound"]
        if not config["kda_safe_gate"]:
            return {"name": "kda", "options": {"rank": "full"}}
        return {"name": "bounded", "options": {"g_min": bound, "rank": "full"}}

    def write(self, value: Any, out: Written) -> None:
        if not isinstance(value, dict) or value["name"] not in ("bounded", "kda"):
            found = value["name"] if isinstance(value, dict) else "nothing"
            raise Inexpressible(f"'{found}', where the family has 'bounded' or 'kda'")
        out.set("kda_safe_gate", value["name"] == "bounded")
        if value["name"] == "bounded":
            out.set("kda_lower_bound", value["options"]["g_min"])


def _write_dense(dense: Sequence[bool], out: Written) -> None:
    out.set("mlp_layer_types", ["dense" if each else "sparse" for each in dense])


def _mlp_types(config: Config) -> list[str]:
    return ["dense" if n < config["first_k_dense_replace"] else "sparse" for n in range(config["num_hidden_layers"])]


def _layer_types(config: Config) -> list[str]:
    size = config["layer_group_size"]
    return [
        "linear_attention" if (layer + 1) % size else "full_attention" for layer in range(config["num_hidden_layers"])
    ]


def _without_theta(data: dict[str, Any]) -> dict[str, Any]:
    """Beside `rope_parameters` transformers writes the theta that it has not read."""
    return {key: value for key, value in data.items() if key != "rope_theta"} if data.get("rope_parameters") else data


class Types(LayerTypes):
    def read(self, config: Config) -> list[str]:
        ffns = config["mlp_layer_types"]
        if len(ffns) != config["num_hidden_layers"] or set(ffns) - {"dense", "sparse"}:
            config.refuse("mlp_layer_types", f"{ffns!r}, and zoo knows 'dense' and 'sparse' for every layer")
            return []
        return super().read(config)


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
                "decay": Decay(),
                "write": {"name": "sigmoid", "options": {"scale": 1.0}},
                "output": {"name": "sigmoid", "options": {"granularity": "elementwise", "rank": "full"}},
            },
        }
    },
    [
        *same("attention.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_norm.weight"),
        *(rule(f"attention.{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed()) for x in "qkv"),
        rule("attention.A_log", "mixer.gates.decay.A_log"),
        rule("attention.dt_bias", "mixer.gates.decay.dt_bias", Reshaped(-1)),
        rule("attention.f_proj.weight", "mixer.gates.decay.f_proj.weight"),
        rule("attention.b_proj.weight", "mixer.gates.write.b_proj.weight"),
        rule("attention.g_proj.weight", "mixer.gates.output.g_proj.weight"),
        rule("attention.dense.weight", "mixer.o_proj.weight"),
        *NORMS,
    ],
)
_MIXER = latent_attention(rope=LatentRope(theta=THETA), logit_scale=LogitScale())
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
        "mlp_layer_types": _mlp_types,
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
    fixed={"attention_bias": (False,)},
    harmless=frozenset(
        # `head_dim`, `layer_group_size` and the like are read where the lists that they stand for are not there
        ["first_k_dense_replace", "head_dim", "layer_group_size", "model_max_length", "mtp_loss_scaling_factor", "qk_head_dim", "num_nextn_predict_layers", "rope_theta", "short_conv_kernel_size"]
    ),
    aliases={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    prepare=_without_theta,
    layers=WithFFN(
        Types({"linear_attention": "kda", "full_attention": "mla"}),
        lambda config, layer: config["mlp_layer_types"][layer] == "dense",
        _write_dense,
    ),
    kinds=with_ffns({"kda": _KDA, "mla": _MLA}, _MOE, DENSE),
)
