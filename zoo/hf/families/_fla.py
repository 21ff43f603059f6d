"""What the models of flash-linear-attention share. Its classes register themselves with transformers when `fla` is
imported; research checkpoints are published in this form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.family import STACK
from zoo.hf.template import ABSENT, Derived, Entry, Inexpressible, Key, Written
from zoo.hf.tensors import Rule, rule, same

FLA_STACK = {**STACK, "norm": {"eps": Key("norm_eps"), "zero_centered": False}}

FLA_ENDS = (
    rule("model.embeddings.weight", "embed.weight"),
    rule("model.norm.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
)

FLA_REST: tuple[Rule, ...] = (
    *same("mlp.", "ffn.", "gate_proj.weight up_proj.weight down_proj.weight"),
    rule("attn_norm.weight", "mixer_residual.norm.weight"),
    rule("mlp_norm.weight", "ffn_residual.norm.weight"),
)

FLA_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",),
    "attn": (None,),
    "attnres_block_size": (None,),
    "elementwise_affine": (True,),
}
"""What zoo does not take of them: layers of softmax attention between (`attn`), residuals of attention."""

FLA_HARMLESS = frozenset(
    (
        "attn_mode",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "fuse_swiglu",
        "hidden_ratio",  # read where there is no intermediate_size
        "use_l2warp",
    )
)


def fla_defaults(**own: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": REQUIRED,
        "hidden_ratio": 4,
        "intermediate_size": None,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        **own,
    }


def _width(config: Config) -> int:
    width = config["intermediate_size"]
    if width is None:
        ratio = config["hidden_ratio"]
        width = int(config["hidden_size"] * (4 if ratio is None else ratio) * 2 / 3)
        width = 256 * -(-width // 256)
    return int(width)


FLA_FFN = {
    "name": "swiglu",
    "options": {"width": Derived(_width, lambda value, out: out.set("intermediate_size", value))},
}


class Expanded(Entry):
    """A width of heads that is `factor` times another: of the key `base`, or of hidden_size shared out over the
    heads."""

    def __init__(self, factor: str, base: str | None = None):
        self.factor, self.base = factor, base

    def read(self, config: Config) -> Any:
        if self.base is not None:
            return int(config[self.base] * config[self.factor])
        return round(config["hidden_size"] * config[self.factor]) // config["num_heads"]

    def write(self, value: Any, out: Written) -> None:
        whole = out["hidden_size"] / out["num_heads"] if self.base is None else out[self.base]
        out.set(self.factor, value / whole)


class Convolution(Entry):
    """The convolution's size, null where `use_short_conv` is false."""

    def read(self, config: Config) -> Any:
        return config["conv_size"] if config["use_short_conv"] else None

    def write(self, value: Any, out: Written) -> None:
        out.set("use_short_conv", value is not None)
        if value is not None:
            out.set("conv_size", value)


class Gate(Entry):
    """The output gate where the key `use` is true: of the activation that the key `kind` says, or silu."""

    def __init__(self, use: str, kind: str | None = None):
        self.use, self.kind = use, kind

    def read(self, config: Config) -> Any:
        if not config[self.use]:
            return ABSENT
        kind = "swish" if self.kind is None else config[self.kind]
        if kind not in ("swish", "silu", "sigmoid"):
            config.refuse(str(self.kind), f"{kind!r}, and zoo knows 'swish', 'silu' and 'sigmoid'")
        return {"name": "sigmoid" if kind == "sigmoid" else "silu", "options": {"granularity": "elementwise"}}

    def write(self, value: Any, out: Written) -> None:
        out.set(self.use, value is not ABSENT)
        if value is ABSENT:
            return
        known = {"silu": "swish"} | ({} if self.kind is None else {"sigmoid": "sigmoid"})
        if value["name"] not in known:
            raise Inexpressible(f"'{value['name']}', where the family has {' or '.join(map(repr, known))}")
        if self.kind is not None:
            out.set(self.kind, known[value["name"]])


WRITE = {
    "name": "sigmoid",
    "options": {"scale": Key("allow_neg_eigval", values={True: 2.0, False: 1.0})},
}
SIZES = {
    "n_heads": Key("num_heads"),
    "n_v_heads": Key("num_v_heads"),
    "head_dim": Key("head_dim"),
    "head_v_dim": Expanded("expand_v", "head_dim"),
    "conv_size": Convolution(),
}
"""Of the delta family."""
