from __future__ import annotations

from torch import Tensor

from zoo.gates.write import WriteGate, float32, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("sigmoid")
class SigmoidWrite(WriteGate):
    """beta = scale · σ(W_b x), one a head: [B,T,H].

    `scale` 1 is DeltaNet's, Gated DeltaNet's and KDA's. 2 lets I - beta k k^T have an eigenvalue in (-1, 1), which
    state tracking needs.

    DeltaNet (arXiv:2406.06484), Gated DeltaNet, KDA; 2: Grazzi et al. 2024 (arXiv:2411.12537), OLMo-Hybrid.
    """

    def __init__(self, slot: Slot, *, scale: float = 1.0):
        super().__init__()
        if not 0 < scale <= 2:
            raise ValueError(f"scale: expected a number in (0, 2], beyond which the delta rule diverges, found {scale}")
        self.scale = scale
        self.b_proj = Linear(slot.d_in, slot.n_heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        beta = float32(self.b_proj(x)).sigmoid()
        return beta if self.scale == 1 else self.scale * beta
