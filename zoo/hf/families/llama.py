"""Llama: Touvron et al. 2023 (arXiv:2302.13971); Grattafiori et al. 2024 (arXiv:2407.21783)."""

from __future__ import annotations

from zoo.hf.configuration import REQUIRED
from zoo.hf.families._llama import ATTENTION, DENSE, NORMS, attention, head_dim
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.template import Key

# one key for the biases of all four projections
_MIXER = attention(qk_norm="none", bias=Key("attention_bias"), out_bias=Key("attention_bias"))

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "vocab_size": REQUIRED,
        "hidden_size": REQUIRED,
        "intermediate_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": None,
    },
    layers=Uniform("attn"),
    kinds={"attn": Kind({"mixer": _MIXER, **DENSE.block}, (*ATTENTION, *DENSE.tensors, *NORMS))},
    fixed={"mlp_bias": (False,)},
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
