"""Gated DeltaNet (arXiv:2412.06464), fla's model."""

from __future__ import annotations

from zoo.hf.families._fla import (
    FLA_ENDS,
    FLA_FFN,
    FLA_FIXED,
    FLA_HARMLESS,
    FLA_REST,
    FLA_STACK,
    SIZES,
    WRITE,
    Gate,
    fla_defaults,
)
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.tensors import rule, same
from zoo.hf.transforms import Unsqueezed

FAMILY = Family(
    model_type="gated_deltanet",
    architecture="GatedDeltaNetForCausalLM",
    defaults=fla_defaults(
        expand_v=2.0,
        use_gate=True,
        use_short_conv=True,
        allow_neg_eigval=False,
        conv_size=4,
        head_dim=256,
        num_heads=6,
        num_v_heads=lambda config: config["num_heads"],
        output_gate_activation="swish",
    ),
    stack=FLA_STACK,
    tensors=FLA_ENDS,
    layers=Uniform("gdn"),
    kinds={
        "gdn": Kind(
            {
                "mixer": {
                    "name": "gated_deltanet",
                    "options": SIZES,
                    "gates": {"decay": "mamba2", "write": WRITE, "output": Gate("use_gate", "output_gate_activation")},
                },
                "ffn": FLA_FFN,
            },
            (
                *same("attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight o_norm.weight"),
                *(rule(f"attn.{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed()) for x in "qkv"),
                *same("attn.", "mixer.gates.decay.", "a_proj.weight A_log dt_bias"),
                rule("attn.b_proj.weight", "mixer.gates.write.b_proj.weight"),
                rule("attn.g_proj.weight", "mixer.gates.output.g_proj.weight"),
                *FLA_REST,
            ),
        )
    },
    fixed=FLA_FIXED,
    harmless=FLA_HARMLESS,
)
