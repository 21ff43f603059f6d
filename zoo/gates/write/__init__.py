"""Write gates: how much of the new value a step writes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from zoo.gates._gate import Gate, float32
from zoo.registry import WRITE

register = WRITE.register


class WriteGate(Gate):
    """S_t <- ... + (beta_t k_t) v_t^T: the gate computes beta, float32, [B,T,H] or [B,T,H,K], in [0,1] or [0,2].

    In the delta family beta is the strength of the correction (2 reflects: negative eigenvalues); elsewhere a factor
    on k.
    """

    kind = "write"
    granularity: ClassVar[str]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [B,T,d_in] -> beta of every step."""


__all__ = ["WriteGate", "float32", "register"]
