from __future__ import annotations

import torch
from torch import Tensor

from zoo.gates.write import Decay, WriteGate, register
from zoo.shapes import Slot


@register("complement")
class ComplementWrite(WriteGate):
    """beta = 1 - exp(log_decay), in the decay's own granularity: [B,T,H] or [B,T,H,K].

    A leaky average: what is forgotten makes room for exactly as much. It reads the decay as it is applied: where that
    is forced to 1 nothing is written.

    HGRN (arXiv:2311.04823); the update gate of the GRU (Cho et al. 2014).
    """

    reads = "decay"
    at_most = 1.0

    def __init__(self, slot: Slot):
        super().__init__()

    def forward(self, x: Decay) -> Tensor:
        return -torch.expm1(x.log_decay)
