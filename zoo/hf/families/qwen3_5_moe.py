"""Qwen3.5 (Qwen team 2026), the sizes with experts. Only the text model is read: of a checkpoint that also sees, the
eyes are left out."""

from __future__ import annotations

from zoo.hf.families._qwen import DEFAULTS, LAYERS, MOE_DEFAULTS, SKIPPED, ZERO_CENTERED, mixers, moe
from zoo.hf.families._qwen3_5 import FIXED, GDN, MULTI_TOKEN, RENAMES, text_config
from zoo.hf.family import Family, Kind

_MOE = moe(True)

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    also=("qwen3_5_moe",),
    prepare=text_config,
    defaults={
        **DEFAULTS,
        **MOE_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    stack=ZERO_CENTERED,
    layers=LAYERS,
    kinds={
        name: Kind({**kind.block, **_MOE.block}, (*kind.tensors, *_MOE.tensors)) for name, kind in mixers(GDN).items()
    },
    fixed=FIXED,
    harmless=MULTI_TOKEN | {"intermediate_size"},  # no layer is dense
    renames=RENAMES,
    skipped=SKIPPED,
)
