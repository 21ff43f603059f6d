from __future__ import annotations

from torch import Tensor

from zoo.gates.output import Granularity, OutputGate, Rank, float32, register
from zoo.nn import projection
from zoo.shapes import Slot


@register("sigmoid")
class SigmoidOutput(OutputGate):
    """score = σ(W_g x): independent gates in (0, 1), elementwise [B,T,H,E] or headwise [B,T,H,1].

    Gated attention's G1 (arXiv:2505.06708), Qwen3-Next (elementwise), Ling-3.0's MLA (headwise), KDA (through the head
    width in Kimi-Linear, full in Kimi K3). W_g starts like every projection, so scores start around 1/2: adding this
    gate to a trained model halves the branch.
    """

    def __init__(self, slot: Slot, *, granularity: Granularity = "elementwise", rank: Rank = "full"):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim if granularity == "elementwise" else 1)
        self.g_proj = projection(slot.d_in, self.shape[0] * self.shape[1], rank, slot.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return float32(self.g_proj(x)).unflatten(-1, self.shape).sigmoid()
