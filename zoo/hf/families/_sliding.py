"""Windows in Qwen2 and Qwen3: some layers slide, if a key of its own says so."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config, Nullable
from zoo.hf.families._llama import ATTENTION, DENSE, NORMS, attention
from zoo.hf.family import Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.template import Derived, Key, Written

LAYERS = LayerTypes({"full_attention": "attn", "sliding_attention": "window"})


def kinds(**options: Any) -> dict[str, Kind]:
    """Attention over all and over a window, with the family's options."""
    rules = (*ATTENTION, *DENSE.tensors, *NORMS)
    window = Derived(_window, _write_window)
    return {
        "attn": Kind({"mixer": attention(**options), **DENSE.block}, rules),
        "window": Kind({"mixer": attention(**options, window=window), **DENSE.block}, rules),
    }


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
    layers = range(config["num_hidden_layers"])
    return ["sliding_attention" if layer >= first else "full_attention" for layer in layers]


DEFAULTS: dict[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "use_sliding_window": False,
    "sliding_window": Nullable(4096),
    "max_window_layers": 28,
    "layer_types": _layer_types,
}

HARMLESS = frozenset({"max_window_layers"})
"""Only the default of layer_types reads it."""
