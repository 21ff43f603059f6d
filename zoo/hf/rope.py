"""`rope_parameters` of a config.json <-> the option `rope` of a mixer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.template import ABSENT, Entry, Inexpressible, Written

KEY = "rope_parameters"
_UNUSED = ("mrope_section", "mrope_interleaved")  # they place images; a text's three positions are one
_NUMBERS = ("rope_theta", "partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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
        if kind == "llama3":
            known += _LLAMA3
        elif kind == "yarn":
            known += [*_YARN, "attention_factor", "mscale", "mscale_all_dim", "truncate"]
        elif kind != "default":
            config.refuse(f"{KEY}.rope_type", f"'{kind}', and zoo knows 'default', 'yarn' and 'llama3'")
            return None
        for key, value in rope.items():
            if key not in known:
                config.refuse(f"{KEY}.{key}", f"{value!r}, which zoo does not understand")
            elif key in (*_NUMBERS, *_YARN, *_LLAMA3) and not isinstance(value, (int, float, type(None))):
                config.refuse(f"{KEY}.{key}", f"{value!r}, where a number stands")
        if config.faults:
            return None
        theta = rope.get("rope_theta", self.theta)
        if theta is None:
            if not self.optional:
                config.refuse(f"{KEY}.rope_theta", "null, where the family needs a number")
            return None
        said = rope.get("partial_rotary_factor")
        fraction = self.fraction if said is None else float(said)
        if not 0 < fraction <= 1:
            config.refuse(f"{KEY}.partial_rotary_factor", f"{fraction}, and zoo rotates more than none and at most all")
            return None
        if self.fraction == 1.0 != fraction:
            config.refuse(f"{KEY}.partial_rotary_factor", f"{fraction}, which transformers ignores in this family")
        out = {"theta": float(theta), "fraction": fraction, "interleaved": self.interleaved}
        if kind == "default":
            return out
        return {**out, kind: _read_yarn(rope, config) if kind == "yarn" else _needed(rope, _LLAMA3, kind, config)}

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
        for kind in ("yarn", "llama3"):
            if value[kind] is not None:
                rope |= {"rope_type": kind, **value[kind]}
        out.set(KEY, rope)


def _read_yarn(rope: Mapping[str, Any], config: Config) -> dict[str, Any]:
    if not _needed(rope, ("factor", "original_max_position_embeddings"), "yarn", config):
        return {}
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, **{key: rope[key] for key in _YARN if rope.get(key) is not None}}
    factor, one, other = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is None and one and other:  # transformers looks at either beside the other only
        factor = mscale(yarn["factor"], one) / mscale(yarn["factor"], other)
    elif factor is None:
        factor = mscale(yarn["factor"], 1.0)
    return {**yarn, "attention_factor": factor, "truncate": rope.get("truncate", True)}


def _needed(rope: Mapping[str, Any], keys: Sequence[str], kind: str, config: Config) -> dict[str, Any]:
    """The values of keys that must be there; {} where one is not."""
    for key in keys:
        if rope.get(key) is None:
            config.refuse(f"{KEY}.{key}", f"missing, and {kind} needs it")
            return {}
    return {key: rope[key] for key in keys}


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
