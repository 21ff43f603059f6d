"""A linear map without weights between groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupedLinear(nn.Linear):
    """y_g = W_g x_g: `n_groups` equal parts of x, each through a map of its own.

    x [..., d_in] -> y [..., n_groups · d_group]; the weight is [n_groups · d_group, d_in / n_groups], the W_g one below
    the other. It is an nn.Linear, so that its matrix starts, decays and is counted like those of all projections.
    DeepSeek-V4, §2.3.1, in front of the output projection.
    """

    def __init__(self, d_in: int, d_group: int, n_groups: int):
        super().__init__(d_in // n_groups, n_groups * d_group, bias=False)
        self.n_groups = n_groups

    def forward(self, x: Tensor) -> Tensor:
        maps = self.weight.unflatten(0, (self.n_groups, -1))
        return torch.einsum("...gi,goi->...go", x.unflatten(-1, (self.n_groups, -1)), maps).flatten(-2)
