"""RWKV-7 "Goose" (arXiv:2503.14456), fla's model: LayerNorms, one of them behind the embedding, and channel mixing."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import REQUIRED, Config, Nullable
from zoo.hf.families._fla import FLA_ENDS
from zoo.hf.family import STACK, Family, Kind
from zoo.hf.layers import COUNT, Uniform
from zoo.hf.template import Derived, Inexpressible, Key, Written
from zoo.hf.tensors import rule, same
from zoo.hf.transforms import Reshaped


def _head_dim(config: Config) -> int:
    width = config["head_dim"]
    if width is not None:
        return int(width)
    if config["num_heads"] is None:
        config.refuse("head_dim", "null, and so is num_heads")
        return 1
    return int(config["hidden_size"] // config["num_heads"])


def _heads(config: Config) -> int:
    """Only the heads' width counts; another num_heads beside it would be ignored by fla, and hides a mistake."""
    hidden, width, said = config["hidden_size"], _head_dim(config), config["num_heads"]
    if hidden % width:
        config.refuse("head_dim", f"{width}, which does not divide the hidden_size of {hidden}")
    if said not in (None, hidden // width):
        config.refuse("num_heads", f"{said!r}, where hidden_size over head_dim is {hidden // width}")
    return int(hidden // width)


def _write_heads(value: int, out: Written) -> None:
    if out["hidden_size"] % value:
        raise Inexpressible(f"{value}, where the family shares out the hidden size of {out['hidden_size']}")
    out.set("num_heads", value)
    out.set("head_dim", out["hidden_size"] // value)


def _write_head_dim(value: int, out: Written) -> None:
    if value != out["head_dim"]:
        raise Inexpressible(f"{value}, where the family has hidden_size over num_heads, {out['head_dim']}")


def _value_dim(config: Config) -> int:
    """fla cannot build a model whose values are wider than its hidden size: the start of `v_lora` does not fit."""
    hidden, said = config["hidden_size"], config["value_dim"]
    values = said if isinstance(said, list) else [hidden if said is None else said] * config[COUNT]
    if values != [hidden] * config[COUNT]:
        config.refuse(
            "value_dim", f"{said!r}, and zoo knows the hidden_size, {hidden}, for each of {config[COUNT]} layers"
        )
    return _head_dim(config)


def _width(config: Config) -> int:
    width, ratio = config["intermediate_size"], config["hidden_ratio"]
    if width is None:
        width = 32 * -(-int(config["hidden_size"] * (4 if ratio is None else ratio)) // 32)
    return int(width)


def _rank(key: str, factor: float, *, by_head: bool = True) -> Derived:
    """A rank; null is what RWKV's code makes of the hidden size, in heads of 64."""

    def read(config: Config) -> Any:
        if config[key] is not None:
            return config[key]
        raw = factor * config["hidden_size"] ** 0.5 * (_head_dim(config) / 64 if by_head else 1)
        return max(32, round(raw / 32) * 32)

    def write(value: int, out: Written) -> None:
        out.set(key, value)

    return Derived(read, write)


FAMILY = Family(
    model_type="rwkv7",
    architecture="RWKV7ForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": REQUIRED,
        "head_dim": Nullable(64),
        "num_heads": None,
        "value_dim": None,
        "decay_low_rank_dim": Nullable(64),
        "gate_low_rank_dim": Nullable(128),
        "a_low_rank_dim": Nullable(64),
        "v_low_rank_dim": Nullable(16),
        "hidden_ratio": Nullable(4.0),
        "intermediate_size": None,
        "norm_first": True,
        "norm_eps": 1e-5,
        "fuse_norm": True,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    stack={
        **STACK,
        "norm": {"kind": "layer", "eps": Key("norm_eps"), "zero_centered": False},
        "embed_norm": Key("norm_first"),
    },
    tensors=(
        *FLA_ENDS,
        rule("model.norm.bias", "norm.bias"),
        *same("model.layers.0.pre_norm.", "embed_norm.", "weight bias"),
    ),
    layers=Uniform("rwkv7"),
    kinds={
        "rwkv7": Kind(
            {
                "mixer": {
                    "name": "rwkv7",
                    "options": {
                        "n_heads": Derived(_heads, _write_heads),
                        "head_dim": Derived(_head_dim, _write_head_dim),
                        "head_v_dim": Derived(_value_dim, _write_head_dim),
                        "value_rank": _rank("v_low_rank_dim", 1.7),
                        # unfused, fla divides keys by their length as RWKV's code does; its kernel adds an epsilon
                        "key_eps": Key("fuse_norm", values={True: 1e-6, False: 1e-24}),
                    },
                    "gates": {
                        "decay": {"name": "rwkv7", "options": {"rank": _rank("decay_low_rank_dim", 2.5)}},
                        "write": {"name": "channel", "options": {"rank": _rank("a_low_rank_dim", 2.5)}},
                        "output": {
                            "name": "mlp",
                            "options": {
                                "width": _rank("gate_low_rank_dim", 5.0, by_head=False),
                                "inner": "sigmoid",
                                "outer": "none",
                            },
                        },
                    },
                },
                "ffn": {
                    "name": "rwkv7_channel_mix",
                    "options": {"width": Derived(_width, lambda value, out: out.set("intermediate_size", value))},
                },
            },
            (
                *same("attn.", "mixer.", "r_proj.weight k_proj.weight v_proj.weight o_proj.weight r_k"),
                *(rule(f"attn.{x}", f"mixer.{x}", Reshaped(-1)) for x in ("k_k", "k_a")),
                *(rule(f"attn.x_{x}", f"mixer.shifts.{x}.mu", Reshaped(1, 1, -1)) for x in "rkv"),
                *(
                    rule(f"attn.x_{x}", f"mixer.gates.{slot}.shift.mu", Reshaped(1, 1, -1))
                    for x, slot in {"w": "decay", "a": "write", "g": "output"}.items()
                ),
                rule("attn.w_lora.lora.0.weight", "mixer.gates.decay.a_proj.weight"),
                rule("attn.w_lora.lora.2.weight", "mixer.gates.decay.b_proj.weight"),
                rule("attn.w_lora.lora.2.bias", "mixer.gates.decay.w0", Reshaped(-1)),
                rule("attn.a_lora.lora.0.weight", "mixer.gates.write.b_proj.a.weight"),
                rule("attn.a_lora.lora.2.weight", "mixer.gates.write.b_proj.b.weight"),
                rule("attn.a_lora.lora.2.bias", "mixer.gates.write.a_bias", Reshaped(-1)),
                rule("attn.v_lora.lora.0.weight", "mixer.value_mix.a.weight"),
                rule("attn.v_lora.lora.2.weight", "mixer.value_mix.b.weight"),
                rule("attn.v_lora.lora.2.bias", "mixer.value_bias", Reshaped(-1)),
                rule("attn.g_lora.lora.0.weight", "mixer.gates.output.a_proj.weight"),
                rule("attn.g_lora.lora.2.weight", "mixer.gates.output.b_proj.weight"),
                *(rule(f"attn.g_norm.{x}", f"mixer.o_norm.{x}", Reshaped(-1)) for x in ("weight", "bias")),
                rule("ffn.x_k", "ffn.shift.mu"),
                rule("ffn.key.weight", "ffn.k_proj.weight"),
                rule("ffn.value.weight", "ffn.v_proj.weight"),
                *same("attn_norm.", "mixer_residual.norm.", "weight bias"),
                *same("ffn_norm.", "ffn_residual.norm.", "weight bias"),
            ),
        )
    },
    fixed={"hidden_act": ("sqrelu",), "norm_bias": (True,), "attn": (None,)},
    harmless=frozenset(("attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")),
)
