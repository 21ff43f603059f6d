"""The short causal convolution of the linear mixers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zoo import ops

FEW = 64  # tokens


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
        (y,), state = convolve([self], [x], initial_state, cu_seqlens)
        return y, state


def convolve(
    convs: Sequence[ShortConv], xs: Sequence[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Each x [B,T,D_i] through its own convolution, all of one size, and the state [B,ΣD_i,W-1] of them together.

    Few tokens take as long as the calls that they go through, so their channels are joined; many take as long as their
    copies, so they are not.
    """
    run = partial(ops.short_conv, activation="silu", cu_seqlens=cu_seqlens)
    if len(convs) == 1:
        y, state = run(xs[0], convs[0].weight, convs[0].bias, initial_state=initial_state)
        return [y], state
    widths = [x.shape[-1] for x in xs]
    if xs[0].shape[:2].numel() <= FEW:
        weights: list[Tensor] = [conv.weight for conv in convs]
        biases: list[Tensor] = [conv.bias for conv in convs if conv.bias is not None]
        x, bias = torch.cat(list(xs), dim=-1), torch.cat(biases) if biases else None
        y, state = run(x, torch.cat(weights), bias, initial_state=initial_state)
        return list(y.split_with_sizes(widths, -1)), state
    states = [None] * len(convs) if initial_state is None else initial_state.split(widths, dim=1)
    each = [
        run(x, conv.weight, conv.bias, initial_state=state) for x, conv, state in zip(xs, convs, states, strict=True)
    ]
    return [y for y, _ in each], torch.cat([state for _, state in each], dim=1)
