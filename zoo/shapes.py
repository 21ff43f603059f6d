"""What mixers and gates tell each other, and the one legend of shape letters. No torch.

    B  batch            T  time (tokens)       D  d_model
    H  query/key heads  HV value heads         HK key/value heads of softmax attention
    K  key width        V  value width         E  any per-head width
    C  chunk            N  documents of a packed batch

A slot has two sides. `SlotSpec` is the mixer's: which kind of gate fits, and in which granularities. `Slot` is the
gate's: the sizes of the place that it fills in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norm of a stack: `rms`, x / sqrt(mean(x²) + eps) · w, or · (1 + w) with w at 0 first if `zero_centered`; or
    `layer`, (x - mean(x)) / sqrt(var(x) + eps) · w + b. The kind is that of the norms around the layers: those inside a
    mixer are what its paper has."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    zero_centered: bool = False


@dataclass(frozen=True)
class SlotSpec:
    """A named place in a mixer for one gate.

    `kind` is decay, write, output or branch; `granularities` are those that the mixer's op can take (empty: all);
    `at_most` is the largest value that it stands (None: any). A `required` slot must be filled, an optional one left
    empty means that there is no gate.
    """

    kind: str
    granularities: tuple[str, ...] = ()
    required: bool = False
    at_most: float | None = None


@dataclass(frozen=True)
class Slot:
    """The place that a gate fills: it reads x [B,T,d_in] and gives values for `n_heads` heads of width `head_dim`."""

    name: str
    d_in: int
    n_heads: int
    head_dim: int
    layer: int
    n_layers: int


@dataclass(frozen=True)
class LayerContext:
    """What a part may know of the stack around it. `like_me` counts the layers below that have the same mixer;
    `sublayer` is the one that a residual form belongs to, and the stream `opens` just before this layer or has come
    through others."""

    d_model: int
    layer: int = 0
    n_layers: int = 1
    norm: NormConfig = NormConfig()
    like_me: int = 0
    sublayer: Literal["mixer", "ffn"] = "mixer"
    opens: bool = False

    def slot(self, name: str, n_heads: int, head_dim: int, d_in: int | None = None) -> Slot:
        """The slot `name` of this layer; the gate reads the layer's input unless `d_in` gives another width."""
        return Slot(name, d_in or self.d_model, n_heads, head_dim, self.layer, self.n_layers)
