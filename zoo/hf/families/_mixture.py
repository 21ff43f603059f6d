"""What the families with mixtures of experts share: names of experts, and the router of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.template import Derived, Entry, Inexpressible, Key, Written
from zoo.hf.tensors import Piece, Rule, rule

GLU = ("gate_proj", "up_proj", "down_proj")


def expert_tensors(prefix: str, names: tuple[str, str, str] = GLU) -> list[Rule]:
    """Three matrices for each expert, `names` those of gate, up and down."""
    gate, up, down = (f"{prefix}.{{e}}.{name}.weight" for name in names)
    return [
        rule(gate, Piece("ffn.experts.gate_up_proj", 0, 2)),
        rule(up, Piece("ffn.experts.gate_up_proj", 1, 2)),
        rule(down, "ffn.experts.down_proj"),
    ]


def shared_tensors(prefix: str, names: tuple[str, str, str] = GLU) -> list[Rule]:
    pairs = zip(names, GLU, strict=True)
    return [rule(f"{prefix}.{theirs}.weight", f"ffn.shared.{ours}.weight") for theirs, ours in pairs]


class Shared(Entry):
    """The expert that sees every token: as wide as `count` of the others. With 0 transformers has one of width 0."""

    def __init__(self, count: str, width: str = "moe_intermediate_size", **options: Key):
        self.count, self.width, self.options = count, width, options

    def read(self, config: Config) -> Any:
        count = config[self.count]
        if not count:
            config.refuse(self.count, f"{count!r}, and zoo knows one at least")
            return None
        options = {name: entry.read(config) for name, entry in self.options.items()}
        return {"name": "swiglu", "options": {"width": count * config[self.width], **options}}

    def write(self, value: Any, out: Written) -> None:
        if value is None or value["name"] != "swiglu":
            raise Inexpressible(f"{'nothing' if value is None else value['name']}, where the family has 'swiglu'")
        width, one = value["options"]["width"], out[self.width]
        if width % one:
            raise Inexpressible(f"of width {width}, where the family has a multiple of the experts' {one}")
        out.set(self.count, width // one)
        for name, entry in self.options.items():
            entry.write(value["options"][name], out)


def _write_balance(value: Any, out: Written) -> None:
    if value == "none":
        raise Inexpressible("none, where the family has a selection bias")


BALANCE = Derived(lambda config: "bias", _write_balance)
"""There is a selection bias; how it moves in training is nobody's but zoo's."""


def sigmoid_router(*, renormalize: str, groups: str, top_groups: str, **options: Any) -> dict[str, Any]:
    return {
        "name": "sigmoid",
        "options": {
            "score": "sigmoid",
            "renormalize": Key(renormalize),
            "scaling": Key("routed_scaling_factor"),
            "n_groups": Key(groups),
            "top_groups": Key(top_groups),
            "balance": BALANCE,
            **options,
        },
    }


def mixture(
    *,
    n_experts: str,
    top_k: str,
    router: Mapping[str, Any],
    shared: Any,
    width: str = "moe_intermediate_size",
    **expert: Any,
) -> dict[str, Any]:
    return {
        "name": "moe",
        "options": {
            "n_experts": Key(n_experts),
            "top_k": Key(top_k),
            "expert": {"name": "swiglu", "options": {"width": Key(width), **expert}},
            "router": router,
            "shared": shared,
        },
    }


def mlp_layer_types(config: Config) -> list[str]:
    """The default: dense layers first."""
    first = config["first_k_dense_replace"]
    return ["dense" if layer < first else "sparse" for layer in range(config["num_hidden_layers"])]


def is_dense(config: Config, layer: int) -> bool:
    types = config["mlp_layer_types"]
    if len(types) != config["num_hidden_layers"] or not set(types) <= {"dense", "sparse"}:
        config.refuse("mlp_layer_types", f"{types!r}, and zoo knows dense and sparse, one a layer")
        return False
    return bool(types[layer] == "dense")


def write_dense(dense: Sequence[bool], out: Written) -> None:
    out.set("mlp_layer_types", ["dense" if each else "sparse" for each in dense])
