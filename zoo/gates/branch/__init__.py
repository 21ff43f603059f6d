"""Branch gates: how parallel branches of one layer are weighed."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from zoo.gates._gate import Gate, float32
from zoo.registry import BRANCH

register = BRANCH.register


class BranchGate(Gate):
    """o = Σ_i weights_i · o_i: the gate computes weights [B,T,H,n] for n branches, float32, independent of each
    other."""

    kind = "branch"

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [B,T,d_in] -> the weight of every branch in every head."""


__all__ = ["BranchGate", "float32", "register"]
