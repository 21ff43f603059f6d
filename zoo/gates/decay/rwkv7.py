from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.decode import Size
from zoo.gates.decay import Decay, DecayGate, float32, float32_parameter, register
from zoo.nn import Linear
from zoo.nn.rwkv import by_channel, start_at_rest, zigzag
from zoo.shapes import Slot


@register("rwkv7")
class RWKV7Decay(DecayGate):
    """log_decay = -e^(-1/2) · σ(w0 + W_2 tanh(W_1 x)), one a key channel: [B,T,H,K], in (-0.6065, 0).

    So no step forgets more than 46%. `rank` is W_1's width, by default the head width. w0 starts at -5.5 in the first
    channel and rises to 0.5 in the last, with a zigzag in each head.

    RWKV-7 "Goose" (arXiv:2503.14456), §4.
    """

    granularity = "channel"
    no_decay = ("w0",)

    def __init__(self, slot: Slot, *, rank: Size | None = None):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        self.depth = slot.layer / max(1, slot.n_layers - 1)
        rank = slot.head_dim if rank is None else rank
        self.a_proj = Linear(slot.d_in, rank, bias=False)
        self.b_proj = Linear(rank, slot.n_heads * slot.head_dim, bias=False)
        self.w0 = float32_parameter(*self.shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start_at_rest(self.a_proj, self.b_proj)
        self.w0.copy_(6 * by_channel(*self.shape) ** (1 + self.depth**0.3) - 5.5 + 2.5 * zigzag(*self.shape))

    def forward(self, x: Tensor) -> Decay:
        z = float32(self.b_proj(self.a_proj(x).tanh())).unflatten(-1, self.shape) + self.w0
        return Decay(-math.exp(-0.5) * z.sigmoid())
