"""Native sparse attention (arXiv:2502.11089), fla's model: means for φ, one key and value for all three views."""

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
    fla_defaults,
)
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.template import Derived, Key
from zoo.hf.tensors import rule, same


class Taken(Key):
    """The value of a key that fla's kernels take beside another's; with others fla's class loads, and fails when it
    runs."""

    def __init__(self, name: str, beside: str):
        super().__init__(name)
        self.beside = beside

    def read(self, config: Config) -> Any:
        value, other = super().read(config), config[self.beside]
        if not config.faults and (why := _refused(self.name, value, other)):
            config.refuse(self.name, f"{value} where {self.beside} is {other}: fla's kernels want {why}")
        return value


def _refused(name: str, value: int, other: int) -> str | None:
    if name == "num_kv_heads":
        group, rest = divmod(other, max(value, 1))
        fits = value > 0 and rest == 0 and group >= 16 and group.bit_count() == 1
        return None if fits else "groups of 16, 32, 64, ... query heads"
    rounded = 1 << max(value - 1, 0).bit_length()
    fits = value >= 3 and other.bit_count() == 1 and other >= 2 * rounded
    return None if fits else "3 blocks or more, of a power of 2 of tokens, at least twice as many as there are blocks"


def _window(config: Config) -> int:
    window = Key("window_size").read(config)
    if window == 0:
        config.refuse("window_size", "0: fla then leaves the window out, and zoo has no NSA of two views")
    return int(window)


FAMILY = Family(
    model_type="nsa",
    architecture="NSAForCausalLM",
    defaults=fla_defaults(
        num_hidden_layers=24,
        num_heads=64,
        num_kv_heads=4,
        head_dim=32,
        qkv_bias=False,
        block_size=64,
        block_counts=16,
        window_size=512,
        rope_theta=10000.0,
    ),
    stack=FLA_STACK,
    tensors=FLA_ENDS,
    layers=Uniform("nsa"),
    kinds={
        "nsa": Kind(
            {
                "mixer": {
                    "name": "nsa",
                    "options": {
                        "n_heads": Key("num_heads"),
                        "n_kv_heads": Taken("num_kv_heads", "num_heads"),
                        "head_dim": Key("head_dim"),
                        "compression": "mean",
                        **{name: Key("block_size") for name in ("compress_block", "compress_stride", "select_block")},
                        "n_selected": Taken("block_counts", "block_size"),
                        "window": Derived(_window, Key("window_size").write),
                        "shared_kv": True,
                        "bias": Key("qkv_bias"),
                        "qk_norm": "none",
                        "rope": {"theta": Key("rope_theta"), "fraction": 1.0, "interleaved": False},
                    },
                    "gates": {"branch": "sigmoid"},
                },
                "ffn": FLA_FFN,
            },
            (
                *same("attn.", "mixer.", "q_proj.weight q_proj.bias o_proj.weight"),
                *(rule(f"attn.{x}_proj.{y}", f"mixer.{x}_proj.shared.{y}") for x in "kv" for y in ("weight", "bias")),
                rule("attn.g_proj.weight", "mixer.gates.branch.g_proj.weight"),
                *FLA_REST,
            ),
        )
    },
    fixed=FLA_FIXED,
    harmless=FLA_HARMLESS,
)
