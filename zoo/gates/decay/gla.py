from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gates.decay import Decay, DecayGate, float32, float32_parameter, register
from zoo.nn import Rank, projection
from zoo.shapes import Slot


@register("gla")
class GLADecay(DecayGate):
    """log_decay = logsigmoid(W_2 W_1 x + b) / τ, one a key channel: [B,T,H,K].

    W_1 has the rank 16, τ is 16: the 16th root keeps the memory long, the decay starts around 0.96.

    Gated Linear Attention (arXiv:2312.06635), §4.4.
    """

    granularity = "channel"
    no_decay = ("bias",)

    def __init__(self, slot: Slot, *, rank: Rank = 16, tau: float = 16.0):
        super().__init__()
        if tau <= 0:
            raise ValueError(f"tau: expected a positive number, found {tau}")
        self.tau = tau
        self.shape = (slot.n_heads, slot.head_dim)
        self.f_proj = projection(slot.d_in, slot.n_heads * slot.head_dim, rank, slot.head_dim)
        self.bias = float32_parameter(*self.shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.bias.zero_()

    def forward(self, x: Tensor) -> Decay:
        z = float32(self.f_proj(x)).unflatten(-1, self.shape) + self.bias
        return Decay(F.logsigmoid(z) / self.tau)
