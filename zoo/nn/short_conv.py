"""The short causal convolution of the linear mixers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo import ops


class ShortConv(nn.Module):
    """y_t = silu(Σ_j w[:, j] · x_{t-W+1+j} (+ bias)), depthwise over the W newest tokens of the document.

    x [B,T,D] -> y [B,T,D] and the state, the W-1 newest inputs, from which the next call goes on. Initialised as torch
    initialises a convolution, uniform in ±1/sqrt(W), which is what fla and transformers start from.
    """

    no_decay: tuple[str, ...] = ("weight",)

    def __init__(self, width: int, conv_size: int, *, bias: bool = False):
        super().__init__()
        if conv_size < 2:
            raise ValueError(f"conv_size: expected at least 2 (or null for no convolution), found {conv_size}")
        self.weight = nn.Parameter(torch.empty(width, conv_size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        if bias:
            self.no_decay = ("weight", "bias")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return ops.short_conv(
            x, self.weight, self.bias, activation="silu", initial_state=initial_state, cu_seqlens=cu_seqlens
        )
