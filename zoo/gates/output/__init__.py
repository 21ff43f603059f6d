"""Output gates: how much of each channel passes on."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import Tensor

from zoo.gates._gate import Gate, float32
from zoo.nn import Rank
from zoo.registry import OUTPUT

register = OUTPUT.register

Granularity = Literal["elementwise", "headwise"]


class OutputGate(Gate):
    """y <- score · y for a tensor y [B,T,H,E] inside the layer: the gate computes the score, float32, [B,T,H,E] or
    [B,T,H,1].

    One gate works in five places of a mixer: `output` (G1, after attention or the state's read-out), `value` (G2),
    `key` (G3), `query` (G4) and `post` (G5, after the output projection: one head of width D). Qiu et al. 2025
    (arXiv:2505.06708).
    """

    kind = "output"

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [B,T,d_in] -> the score of every head (and channel)."""


__all__ = ["Granularity", "OutputGate", "Rank", "float32", "register"]
