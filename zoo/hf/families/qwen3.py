"""Qwen3: Yang et al. 2025 (arXiv:2505.09388)."""

from __future__ import annotations

from zoo.hf.families._sliding import DEFAULTS, HARMLESS, LAYERS, kinds
from zoo.hf.family import Family
from zoo.hf.template import Key

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
    layers=LAYERS,
    # one key for the biases of all four projections
    kinds=kinds(qk_norm="head", bias=Key("attention_bias"), out_bias=Key("attention_bias")),
    harmless=HARMLESS,
)
