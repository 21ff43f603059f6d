from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.gates.write import WriteGate, float32, register
from zoo.nn import LowRank, Rank, projection
from zoo.nn.rwkv import by_channel, start_at_rest, zigzag
from zoo.shapes import Slot


@register("channel")
class ChannelWrite(WriteGate):
    """beta = scale · σ(W_b x + b), one a key channel: [B,T,H,K], RWKV-7's in-context learning rate.

    W_b goes through a bottleneck (`rank`; by default the head width) or is full; its bias starts around -0.2, each
    channel a little differently, as RWKV-7's does.

    RWKV-7 "Goose" (arXiv:2503.14456), §4.
    """

    no_decay = ("a_bias",)

    def __init__(self, slot: Slot, *, scale: float = 1.0, rank: Rank = "head_dim"):
        super().__init__()
        if not 0 < scale <= 2:
            raise ValueError(f"scale: expected a number in (0, 2], beyond which the delta rule diverges, found {scale}")
        self.scale = scale
        self.shape = (slot.n_heads, slot.head_dim)
        self.b_proj = projection(slot.d_in, slot.n_heads * slot.head_dim, rank, slot.head_dim)
        self.a_bias = nn.Parameter(torch.empty(*self.shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start = -0.19 + 0.3 * zigzag(*self.shape) + 0.4 * (by_channel(*self.shape) - 0.5)
        self.a_bias.copy_(start)
        if isinstance(self.b_proj, LowRank):
            start_at_rest(self.b_proj.a, self.b_proj.b)

    def forward(self, x: Tensor) -> Tensor:
        z = float32(self.b_proj(x)).unflatten(-1, self.shape) + float32(self.a_bias)
        return self.scale * z.sigmoid()
