"""RetNet (arXiv:2307.08621), fla's model."""

from __future__ import annotations

from zoo.hf.families._fla import FLA_ENDS, FLA_FFN, FLA_HARMLESS, FLA_STACK, Gate, fla_defaults
from zoo.hf.families._retention import FIXED, OPTIONS, TENSORS
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform

FAMILY = Family(
    model_type="retnet",
    architecture="RetNetForCausalLM",
    defaults=fla_defaults(
        hidden_ratio=2,
        expand_k=1.0,
        expand_v=2.0,
        num_heads=8,
        num_kv_heads=lambda config: config["num_heads"],
        use_output_gate=True,
    ),
    stack=FLA_STACK,
    tensors=FLA_ENDS,
    layers=Uniform("retnet"),
    kinds={
        "retnet": Kind(
            {
                "mixer": {
                    "name": "retnet",
                    "options": {**OPTIONS, "rope": {"theta": 10000.0, "fraction": 1.0, "interleaved": False}},
                    "gates": {"decay": "retnet", "output": Gate("use_output_gate")},
                },
                "ffn": FLA_FFN,
            },
            TENSORS,
        )
    },
    fixed={**FIXED, "use_output_gate": (True,)},
    harmless=(FLA_HARMLESS | {"conv_size"}) - {"fuse_norm"},
)
