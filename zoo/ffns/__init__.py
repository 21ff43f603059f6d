"""FFNs: what each token does alone. One a file."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from zoo.registry import FFNS
from zoo.sequence import Layout

register = FFNS.register


class FFN(nn.Module, ABC):
    """x [B,T,D] -> y [B,T,D], token by token. Its constructor takes the context and keyword-only options."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The transformed tokens. `layout` has their ids and, where the loss is computed, its ledger."""


__all__ = ["FFN", "register"]
