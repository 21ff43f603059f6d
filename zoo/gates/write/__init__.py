"""Write gates: how much of the new value a step writes."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.gates._gate import Decay, Gate, float32
from zoo.registry import WRITE

register = WRITE.register


class WriteGate(Gate):
    """S_t <- ... + (beta_t k_t) v_t^T: the gate computes beta >= 0, float32, [B,T,H] or [B,T,H,K].

    In the delta family beta is the strength of the correction, and beyond 2 that diverges; elsewhere it is a factor on
    k. `at_most` is the largest beta that the gate gives. A gate that `reads` the decay gets the Decay of its layer in
    place of x; where it reads the step, the decay gate must give one.
    """

    kind = "write"
    at_most: ClassVar[float] = 2.0

    @abstractmethod
    def forward(self, x: Any) -> Tensor:
        """x [B,T,d_in], or the layer's Decay -> beta of every step."""

    def forced(self, given: Tensor, value: float | Tensor) -> Tensor:
        """ValueError for what the gate could never give."""
        low, high = (float(end) for end in torch.as_tensor(value).aminmax())
        if not 0 <= low <= high <= self.at_most:
            raise ValueError(f"force: this beta is in [0, {self.at_most:g}], found {low if low < 0 else high:g}")
        forced: Tensor = super().forced(given, value)
        return forced


UNBOUNDED = math.inf

__all__ = ["UNBOUNDED", "Decay", "WriteGate", "float32", "register"]
