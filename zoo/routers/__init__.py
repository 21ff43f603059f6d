"""Routers: which experts of a mixture a token goes to, and with what weights. One a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.registry import ROUTERS
from zoo.sequence import Layout
from zoo.shapes import LayerContext

register = ROUTERS.register


@dataclass(frozen=True)
class Routes:
    """experts [N,k] int64, the experts of each token, all different; weights [N,k] float32, by which what they give is
    summed."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module, ABC):
    """x [N,D] -> Routes to `top_k` of `n_experts`. Scores are float32 whatever the precision of the model.

    In a call that computes the loss (`layout.ledger`) a router adds its terms to the loss, and writes down statistics
    of the tokens, from which `update` moves what it does not learn by descent. A forward never changes the router.
    """

    def __init__(self, context: LayerContext, n_experts: int, top_k: int):
        super().__init__()
        if top_k > n_experts:
            raise ValueError(f"top_k: {top_k} of {n_experts} experts")
        self.layer, self.n_experts, self.top_k = context.layer, n_experts, top_k

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Routes:
        """The routes of N tokens, all that `layout` has, in its order."""

    def update(self, statistics: Tensor) -> None:
        """Moves what no gradient moves, once an optimizer step, by the sum of the statistics of the step's tokens over
        calls and processes. Most routers have nothing to move."""


__all__ = ["Router", "Routes", "register"]
