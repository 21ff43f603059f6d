"""DeepSeek-V4 (2026): one key and value for all heads, near and in compressed entries; routing by table; mHC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._deepseek_v4 import CSA, HASH, HCA, Rate, Rope, V4Layers, prepare
from zoo.hf.families._mixture import BALANCE, expert_tensors, mixture, shared_tensors
from zoo.hf.family import Family, Kind
from zoo.hf.layers import COUNT
from zoo.hf.template import Key
from zoo.hf.tensors import Rule, rule


def _mixer(name: str, rope: str, **options: Any) -> dict[str, Any]:
    keys = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    sizes = {"n_heads": Key("num_attention_heads"), "window": Key("sliding_window"), **{key: Key(key) for key in keys}}
    return {"name": name, "options": {**sizes, "rope": Rope(rope), **options}, "gates": {}}


def _compressor(theirs: str, ours: str) -> list[Rule]:
    return [
        rule(f"{theirs}.ape", f"{ours}.position_bias"),
        rule(f"{theirs}.norm.weight", f"{ours}.kv_norm.weight"),
        rule(f"{theirs}.wgate.weight", f"{ours}.gate_proj.weight"),
        rule(f"{theirs}.wkv.weight", f"{ours}.kv_proj.weight"),
    ]


_ATTENTION = [
    rule("attn.wq_a.weight", "mixer.q_a_proj.weight"),
    rule("attn.q_norm.weight", "mixer.q_a_norm.weight"),
    rule("attn.wq_b.weight", "mixer.q_b_proj.weight"),
    rule("attn.wkv.weight", "mixer.kv_proj.weight"),
    rule("attn.norm.weight", "mixer.kv_norm.weight"),
    rule("attn.wo_a.weight", "mixer.o_a_proj.weight"),
    rule("attn.wo_b.weight", "mixer.o_b_proj.weight"),
    rule("attn.attn_sink", "mixer.sinks.logit"),
    *_compressor("attn.compressor", "mixer.compressor"),
    *_compressor("attn.indexer.compressor", "mixer.indexer.compressor"),
    rule("attn.indexer.wq_b.weight", "mixer.indexer.q_b_proj.weight"),
    rule("attn.indexer.weights_proj.weight", "mixer.indexer.weights_proj.weight"),
    rule("attn_norm.weight", "mixer_residual.norm.weight"),
    rule("ffn_norm.weight", "ffn_residual.norm.weight"),
    *(rule(f"hc_attn_{each}", f"mixer_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
    *(rule(f"hc_ffn_{each}", f"ffn_residual.coefficients.{each}") for each in ("fn", "base", "scale")),
]
_INDEX = {key: Key(key) for key in ("index_n_heads", "index_head_dim", "index_topk")}
_MIXERS = {
    "sliding": _mixer("shared_kv", "main"),
    "csa": _mixer("csa", "compress", compress_ratio=Rate(CSA), **_INDEX),
    "hca": _mixer("hca", "compress", compress_ratio=Rate(HCA)),
}
_SCORE = {"score": Key("scoring_func", values={"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"})}
_SCALING = {"scaling": Key("routed_scaling_factor")}
_ROUTERS: dict[str, Mapping[str, Any]] = {
    "": {
        "name": "sigmoid",
        "options": {**_SCORE, **_SCALING, "renormalize": True, "n_groups": 1, "top_groups": 1, "balance": BALANCE},
    },
    HASH: {"name": "hash", "options": {"vocab_size": Key("vocab_size"), **_SCORE, **_SCALING}},
}
_W = ("w1", "w3", "w2")
_MOE = [
    rule("ffn.gate.weight", "ffn.router.proj.weight"),
    rule("ffn.gate.bias", "ffn.router.selection_bias"),
    rule("ffn.gate.tid2eid", "ffn.router.table"),
    *expert_tensors("ffn.experts", _W),
    *shared_tensors("ffn.shared_experts", _W),
]
_GLU = {"width": Key("moe_intermediate_size"), "limit": Key("swiglu_limit")}
_MHC = {
    "name": "mhc",
    "options": {
        "n_streams": Key("hc_mult"),
        "sinkhorn_iters": Key("hc_sinkhorn_iters"),
        "eps": Key("hc_eps"),
        "collapse": "learned",
    },
}


def _kind(mixer: Mapping[str, Any], router: Mapping[str, Any]) -> Kind:
    ffn = mixture(
        n_experts="n_routed_experts",
        top_k="num_experts_per_tok",
        router=router,
        shared={"name": "swiglu", "options": _GLU},
        limit=Key("swiglu_limit"),
    )
    return Kind({"mixer": mixer, "ffn": ffn, "residual": _MHC, "ffn_residual": _MHC}, [*_ATTENTION, *_MOE])


def _layer_types(config: Config) -> list[str]:
    return [HCA if n < 2 or n % 2 == 0 else CSA for n in range(config[COUNT])]


# what says the rotation again is read where `rope_parameters` does not say it
_HARMLESS = frozenset(
    (
        "compress_rope_theta",
        "num_nextn_predict_layers",
        "qk_rope_head_dim",
        "rope_theta",
        "router_aux_loss_coef",
        "router_jitter_noise",
    )
)

FAMILY = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "layer_types": _layer_types,
        "mlp_layer_types": lambda config: ["hash_moe" if n < 3 else "moe" for n in range(config[COUNT])],
        "compress_rates": {CSA: 4, HCA: 128},
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {},
    },
    tensors=(
        rule("model.embed_tokens.weight", "embed.weight"),
        rule("model.norm.weight", "norm.weight"),
        rule("head.weight", "head.weight"),
        *(rule(f"model.hc_head.hc_{each}", f"streams.head.{each}") for each in ("fn", "base", "scale")),
    ),
    layers=V4Layers(),
    kinds={
        name + suffix: _kind(mixer, router) for name, mixer in _MIXERS.items() for suffix, router in _ROUTERS.items()
    },
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        # transformers' class looks at neither
        "norm_topk_prob": (True,),
        "topk_method": (None, "noaux_tc"),
    },
    harmless=_HARMLESS,
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    prepare=prepare,
    # the release has no `model.`
    renames=(
        (r"^embed\.weight$", "model.embed_tokens.weight"),
        (r"^norm\.weight$", "model.norm.weight"),
        (r"^layers\.", "model.layers."),
        (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    ),
    skipped=(r"mtp\..*",),
)
