from __future__ import annotations

from torch import Tensor

from zoo.gates.write import UNBOUNDED, Decay, WriteGate, register
from zoo.shapes import Slot


@register("tied_step")
class TiedStepWrite(WriteGate):
    """beta = Δ, the step that the decay was made of: [B,T,H], unbounded above.

    What forgets more writes more, as the discretised state space model has it: S_t = exp(Δ A) S_{t-1} + Δ B x^T.

    Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060).
    """

    reads = "step"
    at_most = UNBOUNDED

    def __init__(self, slot: Slot):
        super().__init__()

    def forward(self, x: Decay) -> Tensor:
        assert x.step is not None
        return x.step
