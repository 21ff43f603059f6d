from __future__ import annotations

import torch
from torch import Tensor

from zoo.decode import Size
from zoo.gates.decay import Decay, DecayGate, float32, float32_parameter, register
from zoo.nn import Linear
from zoo.nn.rwkv import by_channel, start_at_rest
from zoo.shapes import Slot


@register("rwkv6")
class RWKV6Decay(DecayGate):
    """log_decay = -exp(w0 + W_2 tanh(W_1 x)), one a key channel: [B,T,H,K], unbounded below.

    w0 starts at -6 in the first channel and rises to -1 in the last, the faster the lower the layer: memories of some
    400 tokens down to 3.

    RWKV-6 "Finch" (arXiv:2404.05892), §4.
    """

    granularity = "channel"
    no_decay = ("w0",)

    def __init__(self, slot: Slot, *, rank: Size = 64):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim)
        self.depth = slot.layer / max(1, slot.n_layers - 1)
        self.a_proj = Linear(slot.d_in, rank, bias=False)
        self.b_proj = Linear(rank, slot.n_heads * slot.head_dim, bias=False)
        self.w0 = float32_parameter(*self.shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start_at_rest(self.a_proj, self.b_proj)
        self.w0.copy_(5 * by_channel(*self.shape) ** (0.7 + 1.3 * self.depth) - 6)

    def forward(self, x: Tensor) -> Decay:
        z = float32(self.b_proj(self.a_proj(x).tanh())).unflatten(-1, self.shape)
        # exp(20) forgets all; beyond 88 float32 would overflow
        return Decay(-(z + self.w0).clamp(max=20.0).exp())
