from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.decode import Size
from zoo.gates.output import OutputGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot

INNER: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


@register("mlp")
class MLPOutput(OutputGate):
    """score = σ(W_2 f(W_1 x)), or W_2 f(W_1 x) for `outer: none`: elementwise [B,T,H,E] or headwise [B,T,H,1].

    `width` is that of the layer between, by default the head's; f is `inner`. RWKV-7's gate has a sigmoid inside and
    nothing outside: `{inner: sigmoid, outer: none}`.

    RWKV-7 (arXiv:2503.14456), §4.
    """

    def __init__(
        self,
        slot: Slot,
        *,
        width: Size | None = None,
        inner: Literal["silu", "sigmoid", "tanh"] = "silu",
        outer: Literal["sigmoid", "none"] = "sigmoid",
        granularity: Literal["elementwise", "headwise"] = "elementwise",
    ):
        super().__init__()
        width = slot.head_dim if width is None else width
        self.inner, self.outer = INNER[inner], outer
        self.shape = (slot.n_heads, 1 if granularity == "headwise" else slot.head_dim)
        self.a_proj = Linear(slot.d_in, width, bias=False)
        self.b_proj = Linear(width, self.shape[0] * self.shape[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = float32(self.b_proj(self.inner(self.a_proj(x)))).unflatten(-1, self.shape)
        return z.sigmoid() if self.outer == "sigmoid" else z
