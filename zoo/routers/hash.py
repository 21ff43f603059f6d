from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.decode import Size
from zoo.nn import Linear
from zoo.routers import Router, Routes, logits, register
from zoo.routers._scores import Score, score, share
from zoo.sequence import Layout
from zoo.shapes import LayerContext


@register("hash")
class Hash(Router):
    """The experts table[v] of a token of id v, each with scaling · s / Σ_k s, s = σ(W x) or sqrt(softplus(W x)).

    The table [vocab_size, k] is a buffer and never learnt. Here it starts with k different experts a token id, spread
    evenly and differently in each layer; a released checkpoint brings its own. For the first layers, where a choice by
    the hidden state is worth little.

    Hash Layers (Roller et al. 2021, arXiv:2106.04426); the weights by scores: DeepSeek-V4.
    """

    exempt = {"ties_go_to_the_earliest": "the table chooses, not the scores"}  # noqa: RUF012
    table: Tensor

    def __init__(
        self,
        context: LayerContext,
        n_experts: int,
        top_k: int,
        *,
        vocab_size: Size,
        score: Score = "sqrtsoftplus",
        scaling: float = 1.0,
    ):
        super().__init__(context, n_experts, top_k)
        self.score, self.scaling = score, scaling
        self.proj = Linear(context.d_model, n_experts, bias=False)
        self.register_buffer("table", torch.empty(vocab_size, top_k, dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # not drawn: all processes need the same table
        token = torch.arange(len(self.table), device=self.table.device)
        mixed = _mix(token + _mix(torch.full_like(token, self.layer + 1)))
        coprime = [step for step in range(1, self.n_experts + 1) if math.gcd(step, self.n_experts) == 1]
        step = torch.tensor(coprime, device=token.device)[_mix(mixed) % len(coprime)]
        turn = torch.arange(self.top_k, device=token.device)
        self.table.copy_((mixed[:, None] + step[:, None] * turn) % self.n_experts)

    def forward(self, x: Tensor, layout: Layout) -> Routes:
        if layout.tokens is None:
            raise ValueError("hash: routes by token ids, and this call has hidden states only")
        tokens = layout.tokens.flatten()
        self._check(tokens)
        chosen = self.table[tokens]
        if layout.ledger is not None:
            self.note(layout, chosen)
        return Routes(chosen, share(score(logits(self.proj, x), self.score).gather(1, chosen), self.scaling))

    def _check(self, tokens: Tensor) -> None:
        # on a GPU the look would stall the stream, and the gather's own assertion stops the run
        if tokens.device.type == "cpu" and tokens.numel() and int(tokens.max()) >= len(self.table):
            raise ValueError(f"hash: token {int(tokens.max())}, and the table has vocab_size {len(self.table)} rows")


def _mix(numbers: Tensor) -> Tensor:
    """Numbers below 2^31 that have nothing to do with each other, of int64 ones (Wang's integer hash)."""
    mask = 0x7FFFFFFF
    numbers = ((numbers ^ 61) ^ (numbers >> 16)) * 9 & mask
    numbers = (numbers ^ (numbers >> 4)) * 0x27D4EB2D & mask
    return numbers ^ (numbers >> 15)
