"""Qwen3: Yang et al. 2025 (arXiv:2505.09388)."""

from __future__ import annotations

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._llama import ATTENTION, DENSE, NORMS, attention
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.template import Derived, Key, Written


def _window(config: Config) -> int:
    """transformers forgets the window unless another key says that it is used."""
    if not config["use_sliding_window"] or config["sliding_window"] is None:
        config.refuse("use_sliding_window", "false, and some layers slide")
    return int(config["sliding_window"] or 0)


def _write_window(value: int | None, out: Written) -> None:
    Key("sliding_window").write(value, out)
    out.set("use_sliding_window", True)


def _layer_types(config: Config) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    first = config["max_window_layers"] if slides else config["num_hidden_layers"]
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(config["num_hidden_layers"])]


_REST = (*ATTENTION, *DENSE.tensors, *NORMS)
_OPTIONS = {"qk_norm": "head", "bias": Key("attention_bias"), "out_bias": Key("attention_bias")}

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        "vocab_size": REQUIRED,
        "hidden_size": REQUIRED,
        "intermediate_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": _layer_types,
    },
    harmless=frozenset({"max_window_layers"}),  # the default of layer_types reads it
    layers=LayerTypes({"full_attention": "attn", "sliding_attention": "window"}),
    kinds={
        "attn": Kind({"mixer": attention(**_OPTIONS), **DENSE.block}, _REST),
        "window": Kind({"mixer": attention(**_OPTIONS, window=Derived(_window, _write_window)), **DENSE.block}, _REST),
    },
)
