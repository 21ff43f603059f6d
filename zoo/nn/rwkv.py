"""How RWKV starts: every channel a little differently, from fast to slow, and what depends on the token not yet.

Curves are worked out on the CPU, whatever device is current: on the meta device the first power costs seconds of
imports.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def by_channel(*shape: int) -> Tensor:
    """From 0 in the first to 1 in the last channel, over all heads."""
    return torch.linspace(0, 1, shape[0] * shape[1], dtype=torch.float32, device="cpu").view(shape)


def zigzag(n_heads: int, width: int) -> Tensor:
    """x|x| with x from -1 to 1 over the channels of each head."""
    x = torch.linspace(-1, 1, width, dtype=torch.float32, device="cpu").expand(n_heads, -1)
    return x * x.abs()


@torch.no_grad()
def start_at_rest(first: nn.Linear, second: nn.Linear) -> None:
    """Two maps with a narrow layer between: the first at 0, so that at first only biases speak; the second small, with
    the spread of the official orthogonal start, 0.1 / sqrt(width)."""
    first.weight.zero_()
    second.weight.normal_(std=0.1 * max(second.weight.shape) ** -0.5)
