from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.decode import AtLeast
from zoo.nn import Linear
from zoo.routers import Router, Routes, best, logits, register
from zoo.sequence import Layout
from zoo.shapes import LayerContext


@register("softmax")
class Softmax(Router):
    """p = softmax(W x) over all experts; the k largest, each with its p, or if `renormalize` with p / Σ_top-k p.

    With `bias` z = W x + b. To the loss it adds `load_balance` · E Σ_e f_e P_e, f_e the share of the step's tokens that
    go to expert e (all shares sum to k) and P_e the mean p_e, so that even loads give k; and `z_loss` · mean(logsumexp
    (z)²), which keeps logits small. In training f is that of all data-parallel processes together: of a single
    sequence's tokens no evenness is asked.

    Shazeer et al. 2017 (arXiv:1701.06538); load balance: Switch (arXiv:2101.03961), Mixtral; over the global batch: Qiu
    et al. 2025 (arXiv:2501.11873); z-loss: ST-MoE (arXiv:2202.08906).
    """

    def __init__(
        self,
        context: LayerContext,
        n_experts: int,
        top_k: int,
        *,
        renormalize: bool = True,
        load_balance: Annotated[float, AtLeast(0)] = 0.0,
        z_loss: Annotated[float, AtLeast(0)] = 0.0,
        bias: bool = False,
    ):
        super().__init__(context, n_experts, top_k)
        self.renormalize, self.load_balance, self.z_loss = renormalize, load_balance, z_loss
        self.proj = Linear(context.d_model, n_experts, bias=bias)

    def forward(self, x: Tensor, layout: Layout) -> Routes:
        z = logits(self.proj, x)
        chosen = best(z, self.top_k)
        if layout.ledger is not None:
            loads = self.note(layout, chosen)
            if self.load_balance:
                layout.ledger.add("load_balance", self.load_balance * self._imbalance(z, loads))
            if self.z_loss:
                layout.ledger.add("z_loss", self.z_loss * z.logsumexp(-1).square().mean())
        if self.renormalize:
            return Routes(chosen, z.gather(1, chosen).softmax(-1))
        return Routes(chosen, z.softmax(-1).gather(1, chosen))

    def _imbalance(self, z: Tensor, loads: Tensor) -> Tensor:
        counts = torch.cat([loads, loads.new_tensor([len(z)])])
        # only in training do all processes surely call as often
        if self.training and dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts)
        shares = counts[:-1] / counts[-1]
        return self.n_experts * (shares * z.softmax(-1).mean(0)).sum()
