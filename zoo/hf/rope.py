"""`rope_parameters` of a config.json <-> the option `rope` of a mixer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.template import ABSENT, Entry, Inexpressible, Written

KEY = "rope_parameters"
_UNUSED = ("mrope_section", "mrope_interleaved")  # they place images; a text's three positions are one
_NUMBERS = ("rope_theta", "partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


class RopeKeys(Entry):
    """Theta, the rotated fraction and YaRN. `theta` and `fraction` are what the family has where its configuration says
    nothing; a fraction of 1 is that of families in which transformers does not look at the key. `interleaved` is its
    own, and none of the configuration's. With `optional`, a theta of null is no rotation at all."""

    def __init__(
        self, *, theta: float = 10000.0, fraction: float = 1.0, interleaved: bool = False, optional: bool = False
    ):
        self.theta, self.fraction, self.interleaved, self.optional = theta, fraction, interleaved, optional

    def read(self, config: Config) -> Any:
        rope = config[KEY] or {}
        kind = rope.get("rope_type", "default")
        known = ["rope_type", "rope_theta", "partial_rotary_factor", *_UNUSED]
        if kind == "yarn":
            known += [*_YARN, "attention_factor", "mscale", "mscale_all_dim", "truncate"]
        elif kind != "default":
            config.refuse(f"{KEY}.rope_type", f"'{kind}', and zoo knows 'default' and 'yarn'")
            return None
        for key, value in rope.items():
            if key not in known:
                config.refuse(f"{KEY}.{key}", f"{value!r}, which zoo does not understand")
            elif key in (*_NUMBERS, *_YARN) and not isinstance(value, (int, float, type(None))):
                config.refuse(f"{KEY}.{key}", f"{value!r}, where a number stands")
        if config.faults:
            return None
        theta = rope.get("rope_theta", self.theta)
        if theta is None:
            if not self.optional:
                config.refuse(f"{KEY}.rope_theta", "null, where the family needs a number")
            return None
        fraction = float(rope.get("partial_rotary_factor") or self.fraction)
        if self.fraction == 1.0 != fraction:
            config.refuse(f"{KEY}.partial_rotary_factor", f"{fraction}, which transformers ignores in this family")
        out = {"theta": float(theta), "fraction": fraction, "interleaved": self.interleaved}
        return out if kind == "default" else {**out, "yarn": _read_yarn(rope, config)}

    def write(self, value: Any, out: Written) -> None:
        if value is None and self.optional:
            out.set(KEY, {"rope_type": "default", "rope_theta": None})
            return
        if value in (None, ABSENT):
            raise Inexpressible("null, where the family rotates")
        if value["interleaved"] != self.interleaved:
            raise Inexpressible(f"interleaved: {value['interleaved']}, where the family has {self.interleaved}")
        rope = {"rope_type": "default", "rope_theta": value["theta"]}
        if self.fraction == 1.0 != value["fraction"]:
            raise Inexpressible(f"fraction: {value['fraction']}, where the family rotates all channels")
        if self.fraction != 1.0:
            rope["partial_rotary_factor"] = value["fraction"]
        if value["yarn"] is not None:
            rope |= {"rope_type": "yarn", **value["yarn"]}
        out.set(KEY, rope)


def _read_yarn(rope: Mapping[str, Any], config: Config) -> dict[str, Any]:
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            config.refuse(f"{KEY}.{key}", "missing, and YaRN needs it")
            return {}
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, **{key: rope[key] for key in _YARN if rope.get(key) is not None}}
    factor = rope.get("attention_factor")
    if factor is None:
        factor = mscale(yarn["factor"], rope.get("mscale") or 1.0)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            factor /= mscale(yarn["factor"], rope["mscale_all_dim"])
    return {**yarn, "attention_factor": factor, "truncate": rope.get("truncate", True)}


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
