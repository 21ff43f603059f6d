"""Kimi Delta Attention (arXiv:2510.26692), fla's model, whose output gate has a bias."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.families._fla import (
    FLA_ENDS,
    FLA_FFN,
    FLA_FIXED,
    FLA_HARMLESS,
    FLA_REST,
    FLA_STACK,
    SIZES,
    WRITE,
    Expanded,
    fla_defaults,
)
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.template import Derived, Entry, Inexpressible, Written
from zoo.hf.tensors import rule, same
from zoo.hf.transforms import Reshaped, Unsqueezed

_RANK = Expanded("expand_v", "head_dim")


class Decay(Entry):
    """Bounded where there is a `lower_bound`, which transformers wants `safe_gate` beside."""

    def read(self, config: Config) -> Any:
        bound, rank = config["lower_bound"], _RANK.read(config)
        if config["safe_gate"] != (bound is not None):
            config.refuse(
                "safe_gate", f"{config['safe_gate']!r} where lower_bound is {bound!r}: zoo knows both or none"
            )
        if bound is None:
            return {"name": "kda", "options": {"rank": rank}}
        return {"name": "bounded", "options": {"granularity": "channel", "g_min": bound, "rank": rank}}

    def write(self, value: Any, out: Written) -> None:
        name = value["name"] if isinstance(value, dict) else "nothing"
        if name not in ("bounded", "kda"):
            raise Inexpressible(f"'{name}', where the family has 'bounded' or 'kda'")
        out.set("safe_gate", name == "bounded")
        out.set("lower_bound", value["options"]["g_min"] if name == "bounded" else None)


FAMILY = Family(
    model_type="kda",
    architecture="KDAForCausalLM",
    defaults=fla_defaults(
        expand_v=1.0,
        use_short_conv=True,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        conv_size=4,
        head_dim=128,
        num_heads=16,
        num_v_heads=lambda config: config["num_heads"],
    ),
    stack=FLA_STACK,
    tensors=FLA_ENDS,
    layers=Uniform("kda"),
    kinds={
        "kda": Kind(
            {
                "mixer": {
                    "name": "kda",
                    "options": SIZES,
                    "gates": {
                        "decay": Decay(),
                        "write": WRITE,
                        "output": {
                            "name": "sigmoid",
                            "options": {
                                "granularity": "elementwise",
                                "rank": Derived(_RANK.read, lambda value, out: None),
                                "bias": True,
                            },
                        },
                    },
                },
                "ffn": FLA_FFN,
            },
            (
                *same("attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight o_norm.weight"),
                *(rule(f"attn.{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed()) for x in "qkv"),
                rule("attn.A_log", "mixer.gates.decay.A_log"),
                rule("attn.dt_bias", "mixer.gates.decay.dt_bias", Reshaped(-1)),
                rule("attn.f_proj.0.weight", "mixer.gates.decay.f_proj.a.weight"),
                rule("attn.f_proj.1.weight", "mixer.gates.decay.f_proj.b.weight"),
                rule("attn.b_proj.weight", "mixer.gates.write.b_proj.weight"),
                rule("attn.g_proj.0.weight", "mixer.gates.output.g_proj.a.weight"),
                rule("attn.g_proj.1.weight", "mixer.gates.output.g_proj.b.weight"),
                rule("attn.g_proj.1.bias", "mixer.gates.output.g_proj.b.bias"),
                *FLA_REST,
            ),
        )
    },
    fixed=FLA_FIXED,
    harmless=FLA_HARMLESS,
)
