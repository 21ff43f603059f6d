"""Mamba-2 (arXiv:2405.21060), fla's model; transformers' own of the same name says its sizes in other keys."""

from __future__ import annotations

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._fla import FLA_STACK
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform
from zoo.hf.template import Derived, Inexpressible, Key, Written
from zoo.hf.tensors import rule
from zoo.hf.transforms import Cat, Chain, Unsqueezed


def _heads(config: Config) -> int:
    return int(config["expand"] * config["hidden_size"] / config["head_dim"])


def _write_heads(value: int, out: Written) -> None:
    # the heads' width stands behind them in the template
    out.set("num_heads", value)


def _write_width(value: int, out: Written) -> None:
    inner = value * out["num_heads"]
    if inner % out["hidden_size"]:
        raise Inexpressible(f"{value}, where the family has a multiple of the hidden size in all heads")
    out.set("head_dim", value)
    out.set("expand", inner // out["hidden_size"])


_PROJECTED = ["gates.output.g_proj", "v_proj", "k_proj", "q_proj", "gates.decay.a_proj"]
_CONVOLVED = [f"mixer.{x}_conv1d" for x in "vkq"]

FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": REQUIRED,
        "head_dim": 64,
        "num_heads": _heads,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 1,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    stack=FLA_STACK,
    tensors=(
        rule("backbone.embeddings.weight", "embed.weight"),
        rule("backbone.norm_f.weight", "norm.weight"),
        rule("lm_head.weight", "head.weight"),
    ),
    prefix="backbone.layers.{i}.",
    layers=Uniform("mamba2"),
    kinds={
        "mamba2": Kind(
            {
                "mixer": {
                    "name": "mamba2",
                    "options": {
                        "n_heads": Key("n_groups"),
                        "head_dim": Key("state_size"),
                        "n_v_heads": Derived(_heads, _write_heads),
                        "head_v_dim": Derived(lambda config: config["head_dim"], _write_width),
                        "conv_size": Key("conv_kernel"),
                    },
                    "gates": {
                        "decay": "mamba2",
                        "write": "tied_step",
                        "output": {"name": "silu", "options": {"granularity": "elementwise", "rank": "full"}},
                    },
                },
                "ffn": None,
            },
            (
                rule("mixer.in_proj.weight", [f"mixer.{name}.weight" for name in _PROJECTED]),
                rule("mixer.conv1d.weight", [f"{name}.weight" for name in _CONVOLVED], Chain(Cat(), Unsqueezed())),
                rule("mixer.conv1d.bias", [f"{name}.bias" for name in _CONVOLVED]),
                rule("mixer.A_log", "mixer.gates.decay.A_log"),
                rule("mixer.dt_bias", "mixer.gates.decay.dt_bias"),
                rule("mixer.D", "mixer.D"),
                rule("mixer.norm.weight", "mixer.o_norm.weight"),
                rule("mixer.out_proj.weight", "mixer.o_proj.weight"),
                rule("norm.weight", "mixer_residual.norm.weight"),
            ),
        )
    },
    fixed={
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "D_has_hdim": (False,),
        "rmsnorm": (True,),
        "norm_before_gate": (False,),
        # as transformers writes infinity, for which JSON has no word
        "dt_limit": ([0.0, {"__float__": "Infinity"}], [0.0, float("inf")], None),
    },
    harmless=frozenset(
        (
            "A_init_range",
            "chunk_size",
            "conv_init",
            "dt_init_floor",
            "dt_max",
            "dt_min",
            "fuse_cross_entropy",
            "fuse_linear_cross_entropy",
            "fuse_norm",
            "num_heads",  # what the other sizes make it
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "use_l2warp",
        )
    ),
)
