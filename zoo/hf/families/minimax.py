"""MiniMax-Text-01 (arXiv:2501.08313): lightning attention, mixtures throughout, and a stream that is normalised."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._llama import ATTENTION, NORMS, attention, head_dim
from zoo.hf.families._mixture import expert_tensors, mixture
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.rope import RopeKeys
from zoo.hf.template import Derived, Key
from zoo.hf.tensors import rule
from zoo.hf.transforms import Grouped


def _scaled(name: str) -> dict[str, Any]:
    return {"name": "scaled", "options": {"alpha": Key(f"{name}_alpha_factor"), "beta": Key(f"{name}_beta_factor")}}


def _layer_types(config: Config) -> list[str]:
    return ["linear_attention" if n % 2 else "full_attention" for n in range(config["num_hidden_layers"])]


_LIGHTNING = {
    "name": "lightning",
    "options": {
        "n_heads": Key("num_attention_heads"),
        "head_dim": Key("head_dim"),
        # whatever the configuration says
        "norm": Derived(lambda config: {"eps": 1e-6}, lambda value, out: None),
    },
    "gates": {
        "decay": {"name": "lightning", "options": {"variant": "minimax"}},
        "output": {"name": "sigmoid", "options": {"granularity": "elementwise", "rank": "full"}},
    },
}
_ROUTER = {
    "name": "softmax",
    "options": {"renormalize": True, "bias": False, "load_balance": Key("router_aux_loss_coef")},
}
_FFN = mixture(
    n_experts="num_local_experts", top_k="num_experts_per_tok", router=_ROUTER, shared=None, width="intermediate_size"
)
_REST = {"ffn": _FFN, "ffn_residual": _scaled("mlp")}
_TENSORS = [
    rule("block_sparse_moe.gate.weight", "ffn.router.proj.weight"),
    *expert_tensors("block_sparse_moe.experts", ("w1", "w3", "w2")),
    *NORMS,
]

FAMILY = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "router_aux_loss_coef": 0.001,
        "layer_types": _layer_types,
        **{
            f"{name}_{factor}_factor": 1.0
            for name in ("full_attn", "linear_attn", "mlp")
            for factor in ("alpha", "beta")
        },
    },
    layers=LayerTypes({"linear_attention": "lightning", "full_attention": "attn"}),
    kinds={
        "lightning": Kind(
            {"mixer": _LIGHTNING, **_REST, "residual": _scaled("linear_attn")},
            [
                rule(
                    "self_attn.qkv_proj.weight",
                    [f"mixer.{x}_proj.weight" for x in "qkv"],
                    Grouped("num_attention_heads"),
                ),
                rule("self_attn.out_proj.weight", "mixer.o_proj.weight"),
                rule("self_attn.norm.weight", "mixer.o_norm.weight"),
                rule("self_attn.output_gate.weight", "mixer.gates.output.g_proj.weight"),
                *_TENSORS,
            ],
        ),
        "attn": Kind(
            {
                "mixer": attention(qk_norm="none", rope=RopeKeys(theta=1e6), bias=False, out_bias=False),
                **_REST,
                "residual": _scaled("full_attn"),
            },
            [*ATTENTION, *_TENSORS],
        ),
    },
    fixed={"sliding_window": (None,)},
    # the block is of transformers' computation; jitter is of its training
    harmless=frozenset({"block_size", "router_jitter_noise"}),
    aliases={"num_experts": "num_local_experts"},
    # what its slopes make for one size of block
    skipped=(r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",),
)
