from __future__ import annotations

from typing import Literal

from torch import Tensor

from zoo.decode import Size
from zoo.gates.output import OutputGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("slice")
class SliceOutput(OutputGate):
    """score = σ(W_g x[:d_in/k]): a sigmoid gate that reads the first 1/k of its input's channels.

    A k-th of the parameters of `sigmoid`, whatever the granularity.

    The record runs of modded-nanogpt (2025) gate each head from 12 of 768 channels.
    """

    def __init__(self, slot: Slot, *, k: Size = 4, granularity: Literal["elementwise", "headwise"] = "elementwise"):
        super().__init__()
        if k > slot.d_in:
            raise ValueError(f"k: the input has {slot.d_in} channels, of which 1/{k} is none")
        self.d_slice = slot.d_in // k
        self.shape = (slot.n_heads, 1 if granularity == "headwise" else slot.head_dim)
        self.g_proj = Linear(self.d_slice, self.shape[0] * self.shape[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.g_proj(x[..., : self.d_slice])).unflatten(-1, self.shape).sigmoid()
