"""GLM-5.3-Flash (2026), its language model: KDA, and sparse latent attention; mHC.

transformers has classes for the text model without its head and for the one that sees, and none for this one. What is
written is the first's, `AutoModel`'s, with `lm_head.weight` beside it.
"""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config, Nullable
from zoo.hf.families._kda import Decay, kda, kda_tensors
from zoo.hf.families._latent import latent_tensors
from zoo.hf.families._llama import DENSE, NORMS
from zoo.hf.families._mixture import (
    Shared,
    expert_tensors,
    is_dense,
    mixture,
    shared_tensors,
    sigmoid_router,
    write_dense,
)
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes, WithFFN, with_ffns
from zoo.hf.template import Key
from zoo.hf.tensors import rule

_LIMIT = Key("swiglu_limit")
_MHC = {
    "name": "mhc",
    "options": {
        "n_streams": Key("hc_mult"),
        "sinkhorn_iters": Key("hc_sinkhorn_iters"),
        "eps": Key("hc_eps"),
        "collapse": "mean",
    },
}
_STREAMS = {"residual": _MHC, "ffn_residual": _MHC}
_REST = [
    *NORMS,
    *(rule(f"hc_attn_{each}", f"mixer_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
    *(rule(f"hc_ffn_{each}", f"ffn_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
]
_SIZES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_kpool",
)
_KDA = Kind({"mixer": kda(Decay("linear_lower_bound", "head_dim")), **_STREAMS}, [*kda_tensors("self_attn."), *_REST])
_INDEXER = "self_attn.indexer."
_DSA = Kind(
    {
        "mixer": {
            "name": "dsa",
            "options": {
                "n_heads": Key("num_attention_heads", "num_key_value_heads"),
                **{name: Key(name) for name in _SIZES},
            },
            "gates": {},
        },
        **_STREAMS,
    },
    [
        *latent_tensors("self_attn."),
        rule(f"{_INDEXER}wq_b.weight", "mixer.indexer.q_b_proj.weight"),
        rule(f"{_INDEXER}wk.weight", "mixer.indexer.k_proj.weight"),
        rule(f"{_INDEXER}k_norm.weight", "mixer.indexer.k_norm.weight"),
        rule(f"{_INDEXER}k_norm.bias", "mixer.indexer.k_norm.bias"),
        rule(f"{_INDEXER}weights_proj.weight", "mixer.indexer.weights_proj.weight"),
        rule(f"{_INDEXER}index_kpool_compress_ape", "mixer.indexer.position_bias"),
        rule(f"{_INDEXER}index_kpool_compress_gate", "mixer.indexer.gate_proj.weight"),
        *_REST,
    ],
)
_MOE = Kind(
    {
        "ffn": mixture(
            n_experts="n_routed_experts",
            top_k="num_experts_per_tok",
            router=sigmoid_router(renormalize="norm_topk_prob", groups="n_group", top_groups="topk_group"),
            shared=Shared("n_shared_experts", limit=_LIMIT),
            limit=_LIMIT,
        )
    },
    [
        rule("mlp.gate.weight", "ffn.router.proj.weight"),
        rule("mlp.gate.e_score_correction_bias", "ffn.router.selection_bias"),
        *expert_tensors("mlp.experts"),
        *shared_tensors("mlp.shared_experts"),
    ],
)
_DENSE = Kind(
    {"ffn": {"name": "swiglu", "options": {"width": Key("intermediate_size"), "limit": _LIMIT}}}, DENSE.tensors
)


class Types(LayerTypes):
    """All indexers are of their own layer: zoo has none that takes another's choice."""

    def read(self, config: Config) -> list[str]:
        if set(config["indexer_types"]) - {"full"}:
            config.refuse("indexer_types", f"{config['indexer_types']!r}, and zoo knows 'full' only")
        return super().read(config)


_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def _prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The text model's own configuration, and what a release says of its linear layers in a mapping of theirs."""
    around = ("model_type", "text_config", "vision_config", "architectures")
    out = dict(data)
    if isinstance(out.get("text_config"), dict):
        images = [key for key in out if key.startswith(("image_", "video_"))]
        beside = {key: value for key, value in out.items() if key not in (*around, *images)}
        out = {**out["text_config"], **beside}
    out["model_type"] = "glm5_next_text"
    linear = out.pop("linear_attn_config", None)
    if linear is not None:
        safe = linear.get("safe_gate", True)
        out |= {
            _LINEAR.get(key, f"linear_attn_config.{key}"): each for key, each in linear.items() if key != "safe_gate"
        }
        if safe and out.get("linear_lower_bound", -5.0) is None:
            out["linear_lower_bound"] = -5.0
    return out


FAMILY = Family(
    model_type="glm5_next_text",
    also=("glm5_next",),
    architecture="Glm5NextTextModel",
    defaults={
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": 64,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "n_shared_experts": 1,
        "n_routed_experts": 288,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "v_head_dim": 256,
        "qk_nope_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "mlp_layer_types": lambda config: ["dense" if n < 3 else "sparse" for n in range(config["num_hidden_layers"])],
        "layer_types": lambda config: [
            "linear_attention" if n % 4 != 3 else "indexed_attention" for n in range(config["num_hidden_layers"])
        ],
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 16,
        "indexer_types": lambda config: ["full"] * config["num_hidden_layers"],
        "swiglu_limit": 10.0,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": Nullable(-5.0),
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
    },
    layers=WithFFN(
        Types({"linear_attention": "kda", "indexed_attention": "dsa", "full_attention": "dsa"}), is_dense, write_dense
    ),
    kinds=with_ffns({"kda": _KDA, "dsa": _DSA}, _MOE, _DENSE),
    fixed={
        "attention_bias": (False,),
        "qk_rope_head_dim": (0,),
        "index_kpool_always_select_tail": (True,),
        "index_topk_freq": (None, 1),
    },
    harmless=frozenset(
        ["head_dim", "qk_head_dim", "router_aux_loss_coef", "index_skip_topk_offset", "num_nextn_predict_layers"]
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    prepare=_prepare,
    renames=((r"^model\.language_model\.", "model."),),
    skipped=(r"model\.layers\.{n}\..*", r"model\.visual\..*"),
)
