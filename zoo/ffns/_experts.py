"""The stacked experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.ffns import GLU
from zoo.routers import Routes


class Experts(nn.Module):
    """`n_experts` GLUs like `template`, which may lie on the meta device: gate_up_proj [E,2I,D] (gate above up),
    down_proj [E,D,I], and where the template has biases gate_up_bias [E,2I], down_bias [E,D], which start at 0.

    ValueError for a template that has parameters of its own besides: experts share its `combine`.
    """

    projections = ("gate_up_proj", "down_proj")

    def __init__(self, n_experts: int, template: GLU):
        super().__init__()
        width, d_model = template.gate_proj.weight.shape
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * width, d_model))
        self.down_proj = nn.Parameter(torch.empty(n_experts, d_model, width))
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if template.down_proj.bias is not None:
            self.gate_up_bias = nn.Parameter(torch.empty(n_experts, 2 * width))
            self.down_bias = nn.Parameter(torch.empty(n_experts, d_model))
        own = sum(parameter.numel() for parameter in template.parameters())
        if own * n_experts != sum(parameter.numel() for parameter in self.parameters()):
            raise ValueError(f"expert: {type(template).__name__} has parameters that experts cannot have each its own")
        self.params_of_one = own
        self.kind = type(template).__name__
        self.combine = template.combine
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """x [N,D] -> [N,D]."""
        return ops.experts(
            x,
            routes.experts,
            routes.weights,
            self.gate_up_proj,
            self.down_proj,
            self.combine,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )

    def extra_repr(self) -> str:
        n_experts, d_model, width = self.down_proj.shape
        return f"{n_experts} x {self.kind}({d_model}, {width})"
