"""Qwen3.5 (Qwen team 2026), the dense sizes: Qwen3-Next's layers with a SwiGLU. Only the text model is read: of a
checkpoint that also sees, the eyes are left out."""

from __future__ import annotations

from zoo.hf.families._llama import DENSE
from zoo.hf.families._qwen import DEFAULTS, LAYERS, SKIPPED, ZERO_CENTERED, mixers
from zoo.hf.families._qwen3_5 import FIXED, GDN, MULTI_TOKEN, RENAMES, text_config
from zoo.hf.family import Family, Kind

FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    also=("qwen3_5",),
    prepare=text_config,
    defaults={**DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4},
    stack=ZERO_CENTERED,
    layers=LAYERS,
    kinds={
        name: Kind({**kind.block, **DENSE.block}, (*kind.tensors, *DENSE.tensors)) for name, kind in mixers(GDN).items()
    },
    fixed=FIXED,
    harmless=MULTI_TOKEN,
    renames=RENAMES,
    skipped=SKIPPED,
)
