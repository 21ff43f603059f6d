"""What the families with latent attention share: its names, and YaRN's second scale."""

from __future__ import annotations

import math
from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.rope import KEY, RopeKeys, mscale
from zoo.hf.template import Derived, Entry, Inexpressible, Key, Written
from zoo.hf.tensors import Rule, rule, same

LATENT_NORM = Derived(lambda config: {"eps": 1e-6}, lambda value, out: None)
"""The norms of the latents have this epsilon, whatever the configuration says."""

_SECOND = "mscale_all_dim"


def latent_attention(**options: Any) -> dict[str, Any]:
    """Latent attention with the sizes that every family has, and its own options."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {"n_heads": Key("num_attention_heads", "num_key_value_heads"), **{name: Key(name) for name in names}}
    low_rank = {"q_lora_rank": Key("q_lora_rank", optional=True)}
    return {"name": "mla", "options": {**sizes, **low_rank, "norm": LATENT_NORM, **options}, "gates": {}}


def latent_tensors(prefix: str, out: str = "o_proj") -> list[Rule]:
    return [
        *same(prefix, "mixer.", "q_proj.weight q_a_proj.weight q_b_proj.weight kv_b_proj.weight"),
        rule(f"{prefix}q_a_layernorm.weight", "mixer.q_a_norm.weight"),
        rule(f"{prefix}kv_a_layernorm.weight", "mixer.kv_a_norm.weight"),
        rule(f"{prefix}kv_a_proj_with_mqa.weight", "mixer.kv_a_proj.weight"),
        rule(f"{prefix}{out}.weight", "mixer.o_proj.weight"),
    ]


class LatentRope(RopeKeys):
    """As `RopeKeys`, and `interleave` is the key that says whether neighbours are paired, where there is one."""

    def __init__(self, *, theta: float = 10000.0, interleave: str | None = None):
        super().__init__(theta=theta, interleaved=True)
        self.interleave = interleave

    def read(self, config: Config) -> Any:
        value = super().read(config)
        if self.interleave is not None and value is not None:
            value["interleaved"] = config[self.interleave]
        return value

    def write(self, value: Any, out: Written) -> None:
        if self.interleave is not None and isinstance(value, dict):
            out.set(self.interleave, value["interleaved"])
            value = {**value, "interleaved": True}
        own = Written()
        super().write(value, own)
        # another block may have said its second scale already
        said = {_SECOND: out[KEY][_SECOND]} if _SECOND in out.get(KEY, {}) else {}
        out.set(KEY, {**own[KEY], **said})


class LogitScale(Entry):
    """YaRN's `mscale_all_dim` m as a factor of the softmax's scale, (0.1 m ln(factor) + 1)². In a template it stands
    behind the rotation."""

    def read(self, config: Config) -> Any:
        rope = config[KEY] or {}
        second = rope.get(_SECOND) if rope.get("rope_type") == "yarn" else None
        return mscale(rope["factor"], second) ** 2 if second and rope.get("factor") else 1.0

    def write(self, value: Any, out: Written) -> None:
        rope = out.get(KEY, {})
        second = None
        if value != 1.0:
            if rope.get("rope_type") != "yarn" or rope["factor"] <= 1:
                raise Inexpressible(f"{value!r}, which the family has only beside YaRN")
            # rounded, since what is written is read again to the same number
            second = round((math.sqrt(value) - 1) / (0.1 * math.log(rope["factor"])), 10)
        if _SECOND in rope and rope[_SECOND] != second:
            raise Inexpressible(f"{value!r}, and elsewhere another: one '{KEY}' says both")
        if second is not None:
            out[KEY] = {**rope, _SECOND: second}
