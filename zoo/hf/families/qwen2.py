"""Qwen2: Yang et al. 2024 (arXiv:2407.10671). Biases on queries, keys and values, and none on the output."""

from __future__ import annotations

from zoo.hf.families._llama import head_dim
from zoo.hf.families._sliding import DEFAULTS, HARMLESS, LAYERS, kinds
from zoo.hf.family import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**DEFAULTS, "head_dim": head_dim},
    layers=LAYERS,
    kinds=kinds(qk_norm="none", bias=True, out_bias=False),
    harmless=HARMLESS,
)
