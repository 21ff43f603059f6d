from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zoo.decode import Size
from zoo.gates.branch import BranchGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("mlp")
class MLPBranch(BranchGate):
    """weights = σ(W_2 silu(W_1 x)), one a branch and head, each in (0, 1) whatever the others say: [B,T,H,n].

    `width` is that of the layer between, by default H·n. The paper says an MLP and a sigmoid, but neither the width nor
    the activation inside.

    NSA (arXiv:2502.11089), eq. 5.
    """

    def __init__(self, slot: Slot, *, width: Size | None = None):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        n_weights = slot.n_heads * slot.head_dim
        width = n_weights if width is None else width
        self.a_proj = Linear(slot.d_in, width, bias=False)
        self.b_proj = Linear(width, n_weights, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.b_proj(F.silu(self.a_proj(x)))).unflatten(-1, self.shape).sigmoid()
