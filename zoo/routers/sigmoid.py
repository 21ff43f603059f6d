from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from zoo.decode import AtLeast, Size
from zoo.nn import Linear
from zoo.routers import Router, Routes, best, logits, register
from zoo.routers._quantile import histograms, quantiles
from zoo.routers._scores import Score, score, share
from zoo.sequence import Layout
from zoo.shapes import LayerContext


@register("sigmoid")
class Sigmoid(Router):
    """s = σ(W x), or sqrt(softplus(W x)); the k largest s + b, each with scaling · s / Σ_top-k s, or scaling · s.

    The selection bias b [E], float32, is a buffer that starts at 0: it chooses and weighs nothing. It moves once an
    optimizer step, by the loads of all the step's tokens:

        bias      b_e += update_rate · sign(mean load - load_e)
        quantile  b_e such that k / E of these tokens would have chosen e, had the bar been where it was: minus the (1 -
                  k / E)-quantile of s_e - α, α a token's (k + 1)-th largest s + b; then b -= mean(b)
        none      there is no b

    With `n_groups` the experts form groups, and only those of the `top_groups` best can be chosen; a group's score is
    the sum of its two largest s + b.

    DeepSeek-V3 (arXiv:2412.19437), §2.1.2, and its rule of the bias (arXiv:2408.15664); square root of softplus:
    DeepSeek-V4; quantile: Kimi K3 (arXiv:2607.24653), eq. 13-14.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        context: LayerContext,
        n_experts: int,
        top_k: int,
        *,
        score: Score = "sigmoid",
        renormalize: bool = True,
        scaling: float = 1.0,
        n_groups: Size = 1,
        top_groups: Size = 1,
        balance: Literal["bias", "quantile", "none"] = "bias",
        update_rate: Annotated[float, AtLeast(0)] = 1e-3,
    ):
        super().__init__(context, n_experts, top_k)
        if n_experts % n_groups:
            raise ValueError(f"n_groups: {n_experts} experts cannot be shared out over {n_groups} groups")
        if top_groups > n_groups:
            raise ValueError(f"top_groups: {top_groups} of {n_groups} groups")
        if top_k > top_groups * (n_experts // n_groups):
            raise ValueError(f"top_groups: {top_groups} of {n_experts // n_groups} experts each, and top_k is {top_k}")
        if update_rate != 1e-3 and balance != "bias":
            raise ValueError(f"update_rate: {update_rate:g} says nothing with balance: {balance}")
        if balance == "quantile" and score != "sigmoid":
            raise ValueError("balance: the histograms of quantile are of scores between 0 and 1: use score: sigmoid")
        if balance == "quantile" and top_k == n_experts:
            raise ValueError("balance: with all experts chosen there is no bar to move")
        self.score, self.renormalize, self.scaling = score, renormalize, scaling
        self.n_groups, self.top_groups = n_groups, top_groups
        self.balance, self.update_rate = balance, update_rate
        self.proj = Linear(context.d_model, n_experts, bias=False)
        start = None if balance == "none" else torch.empty(n_experts, dtype=torch.float32)
        self.register_buffer("selection_bias", start)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor, layout: Layout) -> Routes:
        s = score(logits(self.proj, x), self.score)
        with torch.no_grad():
            biased = s if self.selection_bias is None else s + self.selection_bias
            chosen = best(self._within_groups(biased), self.top_k)
            if layout.ledger is not None:
                self.note(layout, chosen, histograms(s, biased, self.top_k) if self.balance == "quantile" else None)
        scores = s.gather(1, chosen)
        return Routes(chosen, share(scores, self.scaling) if self.renormalize else scores * self.scaling)

    def _within_groups(self, biased: Tensor) -> Tensor:
        if self.n_groups == 1:
            return biased
        groups = biased.unflatten(-1, (self.n_groups, -1))
        merit = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        outside = torch.ones_like(merit, dtype=torch.bool).scatter(1, best(merit, self.top_groups), False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def update(self, statistics: Tensor) -> None:
        if self.selection_bias is None:
            return
        loads = statistics[:, 0]
        if self.balance == "bias":
            self.selection_bias += self.update_rate * (loads.sum() - len(loads) * loads).sign()
        else:
            bias = -quantiles(statistics[:, 1:], 1 - self.top_k / self.n_experts)
            # of no tokens there are no quantiles; asked by a branch, a GPU would wait
            self.selection_bias.copy_(torch.where(loads.any(), bias - bias.mean(), self.selection_bias))
