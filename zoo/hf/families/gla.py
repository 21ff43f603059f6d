"""Gated linear attention (arXiv:2312.06635), fla's model."""

from __future__ import annotations

from zoo.hf.families._fla import FLA_ENDS, FLA_FFN, FLA_HARMLESS, FLA_STACK, Gate, fla_defaults
from zoo.hf.families._retention import FIXED, OPTIONS, TENSORS
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.tensors import rule
from zoo.hf.transforms import Reshaped

FAMILY = Family(
    model_type="gla",
    architecture="GLAForCausalLM",
    defaults=fla_defaults(
        expand_k=0.5,
        expand_v=1.0,
        num_heads=4,
        num_kv_heads=lambda config: config["num_heads"],
        use_output_gate=True,
    ),
    stack=FLA_STACK,
    tensors=FLA_ENDS,
    layers=Uniform("gla"),
    kinds={
        "gla": Kind(
            {
                "mixer": {
                    "name": "gla",
                    "options": OPTIONS,
                    "gates": {
                        "decay": {"name": "gla", "options": {"rank": 16, "tau": 16.0}},
                        "output": Gate("use_output_gate"),
                    },
                },
                "ffn": FLA_FFN,
            },
            (
                rule("attn.gk_proj.0.weight", "mixer.gates.decay.f_proj.a.weight"),
                rule("attn.gk_proj.1.weight", "mixer.gates.decay.f_proj.b.weight"),
                rule("attn.gk_proj.1.bias", "mixer.gates.decay.bias", Reshaped(-1)),
                *TENSORS,
            ),
        )
    },
    fixed={**FIXED, "clamp_min": (None,), "use_output_gate": (True,)},
    harmless=(FLA_HARMLESS | {"conv_size", "use_gk", "use_gv"}) - {"fuse_norm"},
)
