from __future__ import annotations

from torch import Tensor

from zoo.gates.branch import BranchGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("sigmoid")
class SigmoidBranch(BranchGate):
    """weights = σ(W_g x), one a branch and head, each in (0, 1) whatever the others say: [B,T,H,n].

    W_g starts like every projection, so each branch starts at about half its strength.

    NSA (arXiv:2502.11089), eq. 5, with a linear map for its MLP, as in fla.
    """

    def __init__(self, slot: Slot):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        self.g_proj = Linear(slot.d_in, slot.n_heads * slot.head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.g_proj(x)).unflatten(-1, self.shape).sigmoid()
