"""One key or value for a block of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import Linear


class MeanCompression(nn.Module):
    """The mean of a block: [...,E,l] -> [...,E]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class Compression(nn.Module):
    """φ(x) = W_2 silu(W_1 vec(x + e)) for a block x of l tokens, [...,HK,E,l] -> [...,HK,E]; one φ for keys, one for
    values, the same for all heads.

    e [l,HK,E], 0 at first, is what each position in the block adds. `width` is that of the layer between. The paper
    names an MLP with intra-block positions, no more (arXiv:2502.11089, eq. 7).
    """

    no_decay = ("position",)

    def __init__(self, block: int, n_heads: int, head_dim: int, width: int | None):
        super().__init__()
        width = head_dim if width is None else width
        self.position = nn.Parameter(torch.empty(block, n_heads, head_dim))
        self.a = Linear(block * head_dim, width, bias=False)
        self.b = Linear(width, head_dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.position.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position.permute(1, 2, 0).to(x.dtype)
        return self.b(F.silu(self.a(x.flatten(-2))))
