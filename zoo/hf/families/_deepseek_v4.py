"""What DeepSeek-V4's configuration says in its own way: rotations, compression, the kinds of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.hf.configuration import FILE, Config
from zoo.hf.layers import COUNT, Layers
from zoo.hf.rope import KEY, RopeKeys
from zoo.hf.template import Entry, Inexpressible, Written
from zoo.registry import RecipeError

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MIXERS = {SLIDING: "sliding", CSA: "csa", HCA: "hca"}
HASH = "_hash"
_RATIOS = {0: SLIDING, 4: CSA, 128: HCA}
_PARTIAL = "partial_rotary_factor"


class Rope(Entry):
    """The rotation under one label: `main` near, `compress` where entries are compressed. What is rotated is the key
    `qk_rope_head_dim`, which the fraction of all channels in transformers' configurations only says again."""

    def __init__(self, label: str):
        self.label, self.own = label, RopeKeys(interleaved=True)

    def read(self, config: Config) -> Any:
        rope = dict(config[KEY][self.label])
        width, rotated = config["head_dim"], config["qk_rope_head_dim"]
        if int(width * rope.pop(_PARTIAL, 1.0)) != rotated:
            config.refuse(
                f"{KEY}.{self.label}.{_PARTIAL}", f"not the {rotated} of {width} channels of qk_rope_head_dim"
            )
        inner = Config({KEY: rope}, {KEY: None})
        value = self.own.read(inner)
        for fault in inner.faults:
            name, _, why = fault.partition(" is ")
            config.refuse(name.replace(KEY, f"{KEY}.{self.label}"), why)
        return value

    def write(self, value: Any, out: Written) -> None:
        inner = Written()
        self.own.write(value, inner)
        rope = {**inner[KEY], _PARTIAL: out["qk_rope_head_dim"] / out["head_dim"]}
        _set_within(out, KEY, self.label, rope)


class Rate(Entry):
    """Tokens an entry, of one kind of layer."""

    def __init__(self, kind: str):
        self.kind = kind

    def read(self, config: Config) -> Any:
        rates = config["compress_rates"]
        for unknown in set(rates) - set(MIXERS):
            config.refuse(f"compress_rates.{unknown}", f"{rates[unknown]!r}, which zoo does not understand")
        return rates[self.kind]

    def write(self, value: Any, out: Written) -> None:
        _set_within(out, "compress_rates", self.kind, value)


def _set_within(out: Written, key: str, name: str, value: Any) -> None:
    said = out.get(key, {})
    if said.get(name, value) != value:
        raise Inexpressible(f"{value!r}, and elsewhere {said[name]!r}: one '{key}.{name}' says both")
    out[key] = {**said, name: value}


class V4Layers(Layers):
    """`layer_types` says the mixers, `mlp_layer_types` the routers."""

    def read(self, config: Config) -> list[str]:
        mixers, ffns = config["layer_types"], config["mlp_layer_types"]
        for key, types, known in (("layer_types", mixers, MIXERS), ("mlp_layer_types", ffns, ("hash_moe", "moe"))):
            if len(types) != config[COUNT] or not set(types) <= set(known):
                config.refuse(
                    key, f"{types!r}, and zoo knows {', '.join(known)}, one for each of {config[COUNT]} layers"
                )
                return []
        pairs = zip(mixers, ffns, strict=True)
        return [MIXERS[mixer] + (HASH if ffn == "hash_moe" else "") for mixer, ffn in pairs]

    def write(self, kinds: Sequence[str], out: Written) -> None:
        types = {kind: name for name, kind in MIXERS.items()}
        out.set(COUNT, len(kinds))
        out.set("layer_types", [types[kind.removesuffix(HASH)] for kind in kinds])
        out.set("mlp_layer_types", ["hash_moe" if kind.endswith(HASH) else "moe" for kind in kinds])


def prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The rotations as transformers nests them, and the lists of types where a release says them in other keys."""
    out = dict(data)
    n = out.get(COUNT)
    if not isinstance(n, int):
        raise RecipeError(f"{FILE}: {COUNT}: expected a number, found {n!r}")
    rates = {CSA: out.pop("compress_rate_csa", None), HCA: out.pop("compress_rate_hca", None)}
    rates = {kind: rate for kind, rate in rates.items() if rate is not None}
    out["compress_rates"] = {CSA: 4, HCA: 128, **(out.get("compress_rates") or {}), **rates}
    ratios, hashed = out.pop("compress_ratios", None), out.pop("num_hash_layers", None)
    if out.get("layer_types") is None and ratios is not None:
        out["layer_types"] = [_RATIOS.get(ratio, f"a ratio of {ratio}") for ratio in ratios[:n]]
    if out.get("mlp_layer_types") is None and hashed is not None:
        out["mlp_layer_types"] = ["hash_moe"] * min(n, hashed) + ["moe"] * max(0, n - hashed)
    width, partial = out.get("head_dim", 512), out.pop(_PARTIAL, None)
    if partial is None:
        partial = out["qk_rope_head_dim"] / width if "qk_rope_head_dim" in out else 64 / 512
    out["qk_rope_head_dim"] = int(width * partial)
    theta, far = out.pop("rope_theta", 10000.0), out.pop("compress_rope_theta", 160000.0)
    scaling = out.pop("rope_scaling", None)
    if scaling and out.get(KEY):
        raise RecipeError(f"{FILE}: rope_scaling and {KEY} are both there: zoo does not know which one counts")
    rope = dict(out.get(KEY) or scaling or {})
    said = {name: rope.pop(name) for name in ("main", "compress") if isinstance(rope.get(name), dict)}
    if len(said) < 2:
        rope |= {"rope_type": rope.pop("type")} if "type" in rope else {}
        flat = {"rope_type": "default", **rope, "rope_theta": far, _PARTIAL: partial}
        flat |= {"attention_factor": flat.get("attention_factor", 1.0)} if flat["rope_type"] == "yarn" else {}
        main = {"rope_type": "default", "rope_theta": theta, _PARTIAL: partial}
        said = {"main": main, "compress": flat, **said}
    elif unknown := set(rope) - {"rope_type", "type", "rope_theta", _PARTIAL}:
        raise RecipeError(
            f"{FILE}: {KEY}: {', '.join(sorted(unknown))} beside main and compress, where transformers drops it"
        )
    out[KEY] = said
    return out
