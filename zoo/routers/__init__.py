"""Routers: which experts of a mixture a token goes to, and with what weights. One a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.float32 import KeepFloat32
from zoo.ops._precision import full_precision
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


class Router(KeepFloat32, ABC):
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

    def note(self, layout: Layout, experts: Tensor, more: Tensor | None = None) -> Tensor:
        """Writes down the tokens of each expert, [E,1] int32, and to the right of them what else `update` needs,
        `more` [E,...] of counts; returns the first."""
        loads = count(experts, self.n_experts)
        if layout.ledger is not None:
            columns = [loads[:, None], *([] if more is None else [more])]
            layout.ledger.statistics[self.layer] = torch.cat(columns, dim=1).to(torch.int32)
        return loads


def logits(proj: nn.Linear, x: Tensor) -> Tensor:
    """W x + b of x [N,D], [N,E] in float32 or better, also where the model around runs in lower precision."""
    with full_precision(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if proj.bias is None else proj.bias.to(wide)
        return F.linear(x.to(wide), proj.weight.to(wide), bias)


def count(numbers: Tensor, n: int) -> Tensor:
    """[n] int64: how often each of 0 to n - 1 is there. torch.bincount makes a GPU wait."""
    flat = numbers.flatten()
    return flat.new_zeros(n).scatter_add(0, flat, torch.ones_like(flat))


def best(scores: Tensor, k: int) -> Tensor:
    """Where the k largest of each row lie, the largest first; of equals the earliest. torch.topk alone takes any."""
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # the bits of a float, as an integer, are in its order but for the sign; behind them the place, from the last on
    bits = (scores.detach() + 0.0).view(torch.int32)  # -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[-1] - 1
    keys = (bits.long() << 32) | torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


__all__ = ["Router", "Routes", "best", "count", "logits", "register"]
