from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from zoo.gates.output import OutputGate, float32, register
from zoo.shapes import Slot


@register("input_independent")
class InputIndependentOutput(OutputGate):
    """score = σ(θ), θ = 0 at first: one learnt number a channel [H,E] or a head [H,1], the same for every token.

    A control for what dependence on the input is worth: two fifths of the gain are left.

    Gated attention (arXiv:2505.06708), table 4.
    """

    reads = "nothing"
    no_decay = ("theta",)

    def __init__(self, slot: Slot, *, granularity: Literal["elementwise", "headwise"] = "elementwise"):
        super().__init__()
        self.theta = nn.Parameter(torch.empty(slot.n_heads, 1 if granularity == "headwise" else slot.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.theta.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.theta).sigmoid().expand(*x.shape[:-1], -1, -1)
