"""Residual forms: how a sublayer (a mixer or an FFN) joins the stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from zoo.registry import RESIDUALS
from zoo.shapes import LayerContext

register = RESIDUALS.register


class Residual(nn.Module, ABC):
    """x, f -> x': one sublayer f inside the stream x [B,T,D]. Each sublayer has a residual of its own, which owns its
    norms."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.context = context

    @abstractmethod
    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The stream after the sublayer."""
