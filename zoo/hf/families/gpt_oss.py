"""GPT-OSS (arXiv:2508.10925): sinks, a window in every second layer, experts with biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Size, Tensor

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._llama import ATTENTION, NORMS, attention, head_dim
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.rope import RopeKeys
from zoo.hf.template import Key
from zoo.hf.tensors import rule
from zoo.hf.transforms import Transform

THETA = 150000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GateUp(Transform):
    """Our [E,2I,D] of gates above ups, or [E,2I], as [E,D,2I] of gate and up in turn, or [E,2I]."""

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        tensor = pieces[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return tensor.mT if tensor.ndim == 3 else tensor

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        rows = tensor.mT if tensor.ndim == 3 else tensor
        return [rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)]


class Rows(Transform):
    """Our [E,D,I] as [E,I,D]."""

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return pieces[0].mT

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        return [tensor.mT]


def _layer_types(config: Config) -> list[str]:
    return ["full_attention" if n % 2 else "sliding_attention" for n in range(config["num_hidden_layers"])]


_OPTIONS = {
    "qk_norm": "none",
    "rope": RopeKeys(theta=THETA),
    "normalizer": "learned_sink",
    "bias": Key("attention_bias"),
    "out_bias": Key("attention_bias"),
}
_FFN = {
    "name": "moe",
    "options": {
        "n_experts": Key("num_local_experts"),
        "top_k": Key("num_experts_per_tok"),
        "expert": {
            "name": "gpt_oss_glu",
            "options": {
                "width": Key("intermediate_size"),
                "alpha": Key("swiglu_alpha"),
                "limit": Key("swiglu_limit"),
            },
        },
        "router": {
            "name": "softmax",
            "options": {"renormalize": True, "bias": True, "load_balance": Key("router_aux_loss_coef")},
        },
        "shared": None,
    },
}
_TENSORS = (
    *ATTENTION,
    rule("self_attn.sinks", "mixer.sinks.logit"),
    rule("mlp.router.weight", "ffn.router.proj.weight"),
    rule("mlp.router.bias", "ffn.router.proj.bias"),
    rule("mlp.experts.gate_up_proj", "ffn.experts.gate_up_proj", GateUp()),
    rule("mlp.experts.gate_up_proj_bias", "ffn.experts.gate_up_bias", GateUp()),
    rule("mlp.experts.down_proj", "ffn.experts.down_proj", Rows()),
    rule("mlp.experts.down_proj_bias", "ffn.experts.down_bias"),
    *NORMS,
)


def _with_yarn(data: dict[str, Any]) -> dict[str, Any]:
    """Where nothing is said about RoPE, or null, but perhaps a theta, transformers takes its own YaRN."""
    if data.get("rope_parameters") is not None or data.get("rope_scaling") is not None:
        return data
    out = {key: value for key, value in data.items() if key not in ("rope_scaling", "rope_theta")}
    theta = data.get("rope_theta")
    return {**out, "rope_parameters": YARN if theta is None else {**YARN, "rope_theta": theta}}


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": lambda config: 64 if "head_dim" not in config else head_dim(config),
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": lambda config: YARN,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.001,
        "layer_types": _layer_types,
    },
    layers=LayerTypes({"full_attention": "attn", "sliding_attention": "window"}),
    kinds={
        "attn": Kind({"mixer": attention(**_OPTIONS), "ffn": _FFN}, _TENSORS),
        "window": Kind({"mixer": attention(**_OPTIONS, window=Key("sliding_window")), "ffn": _FFN}, _TENSORS),
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    prepare=_with_yarn,
    harmless=frozenset({"initial_context_length"}),  # what YaRN stretches, once more
)
