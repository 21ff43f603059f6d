"""How RWKV starts: every channel a little differently, from fast to slow."""

from __future__ import annotations

import torch
from torch import Tensor


def by_channel(*shape: int) -> Tensor:
    """From 0 in the first to 1 in the last channel, over all heads."""
    return torch.linspace(0, 1, shape[0] * shape[1], dtype=torch.float32).view(shape)


def zigzag(n_heads: int, width: int) -> Tensor:
    """x|x| with x from -1 to 1 over the channels of each head."""
    x = torch.linspace(-1, 1, width, dtype=torch.float32).expand(n_heads, -1)
    return x * x.abs()
