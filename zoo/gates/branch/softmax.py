from __future__ import annotations

from torch import Tensor

from zoo.gates.branch import BranchGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("softmax")
class SoftmaxBranch(BranchGate):
    """weights = softmax(W_g x) over the branches of a head, [B,T,H,n]: they sum to 1.

    For ablation only. The branches compete: one can open only as far as another closes, and they cannot all close,
    so a head cannot keep out of a token's way. `sigmoid` is what the paper has.

    A control for NSA's independent gates (arXiv:2502.11089), eq. 5; the form is that of a mixture of experts.
    """

    def __init__(self, slot: Slot):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        self.g_proj = Linear(slot.d_in, slot.n_heads * slot.head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.g_proj(x)).unflatten(-1, self.shape).softmax(-1)
